"""Products of stacks of matrices on GPUs. No rule is known here.

``stacks`` has the function, ``kernel`` the Triton kernel behind it, and ``choices`` which tiles, or which library call,
serve which product. Importing this loads nothing.
"""
