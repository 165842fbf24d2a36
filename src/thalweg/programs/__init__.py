"""A rule as a machine reads it: traced into a graph, scheduled into passes over memory, and counted in bytes."""
