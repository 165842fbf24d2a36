"""State in the host's memory, for parameters on a GPU: it is streamed through the GPU's memory at every step."""
