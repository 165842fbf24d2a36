"""Which parameters Kron's kernels step; told without loading torch or Triton."""

from __future__ import annotations

import math

from thalweg.arrays import Shape
from thalweg.rules import Kron
from thalweg.settings import Handling

#: The dtypes of factors that kernels read and write.
FACTORS = ("float32", "bfloat16")
#: Slices and blocks of a parameter, at most: one launch has no more.
MOST_MATRICES = 65535


def reason_unserved(rule: Kron, handling: Handling, shape: Shape, stored: str) -> str:
    """Why these kernels cannot step a parameter, "" if they can. stored: the dtype of its factors."""
    if rule.geometry == "eq":
        return "there is no fused kernel for geometry='eq', which solves triangular systems"
    if rule.precond_precision == "float32":
        return "there is no fused kernel for precond_precision='float32': they multiply in TF32"
    if rule.normalize_grads:
        return "there is no fused kernel for normalize_grads=True, which sums up gradients before a step"
    if rule.damping_mode == "expected":
        return "there is no fused kernel for damping_mode='expected'"
    if handling.on_nonfinite == "raise":
        return "there is no fused kernel of Kron for on_nonfinite='raise'"
    if stored not in FACTORS:
        return f"there is no fused kernel for factors stored in {stored}"
    grid = rule.grid(shape)
    sizes = grid.sizes
    if len(sizes) > 2:
        return f"there is no fused kernel for {len(sizes)} factors"
    if math.prod(shape) == 0:
        return "it has no elements"
    if (matrices := math.prod(shape[: rule.stacked_axes]) * grid.blocks) > MOST_MATRICES:
        return f"it is {matrices} matrices, and there is no fused kernel for more than {MOST_MATRICES}"
    dense = [side for side, diagonal in zip(grid.sides, rule.diagonals(sizes), strict=True) if not diagonal]
    if max(math.prod(size + 64 for size in sizes), *((size + 64) ** 2 for size in dense), 0) >= 2**31:
        return "it has too many elements for 32-bit positions"
    return ""
