"""Fast code: native passes for CPUs, Triton kernels for GPUs, and products of matrices.

Passes and kernels are made from rules, and no module names one. Each is tested against its rule, state included.
"""
