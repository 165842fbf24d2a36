"""Parameters: groups, options, checks, state before the first step, checkpoints, and what explains them."""
