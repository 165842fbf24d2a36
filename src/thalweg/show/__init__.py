"""What the verbs of the command line share when they speak to people: arguments, terminal, devices, units."""
