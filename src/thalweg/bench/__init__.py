"""How long one step takes on this machine: ours and the published ones, in turns."""
