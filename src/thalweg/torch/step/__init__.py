"""Before engines run: which tensors go together, what stays from step to step, and the norm of all gradients."""
