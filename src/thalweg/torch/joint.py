"""What depends on all gradients of a step together: their joint norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError
from thalweg.spaces.sharded import Part
from thalweg.torch.fused import sums_of_squares
from thalweg.torch.rounds import reduced


def squares_of(gradients: Sequence[Tensor], parts: Sequence[Part], *, native: bool) -> list[Tensor]:
    """The sum of squares of each whole gradient, in float64 or, infinite where that overflows, in float32."""
    wide = [torch.float64 if g.dtype == torch.float64 else torch.float32 for g in gradients]
    sums = sums_of_squares(gradients) if native else None
    if sums is not None:
        own = [square.to(kind) for square, kind in zip(sums.unbind(), wide, strict=True)]
    else:
        norms = (torch.linalg.vector_norm(g, dtype=kind) for g, kind in zip(gradients, wide, strict=True))
        own = [norm.square() for norm in norms]
    return reduced("sum", [(square, part.across(None)) for square, part in zip(own, parts, strict=True)])


def scale_to(limit: float, squares: Sequence[Tensor]) -> Tensor:
    """What brings the joint norm down to a limit; joined in float64, so that nothing overflows on the way."""
    home = squares[0].device
    total = torch.stack([square.to(home, torch.float64) for square in squares]).sum().sqrt()
    return 1 / torch.clamp(total / limit, min=1.0)


def check_all_finite(names: Sequence[str], finite: Tensor) -> None:
    guilty = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
    if guilty:
        raise NonFiniteError(f"the gradient is not finite, or too large to be squared: {', '.join(map(repr, guilty))}")
