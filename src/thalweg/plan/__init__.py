"""What an optimizer will cost on a model: memory, traffic and time, before anything is allocated."""
