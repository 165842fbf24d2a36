"""Fast code: native passes for CPUs, Triton kernels for GPUs, and products of matrices.

Passes and kernels are made from rules; Kron's products on GPUs are written by hand. Each is tested against its rule,
state included.
"""
