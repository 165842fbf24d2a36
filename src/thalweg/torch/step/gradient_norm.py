"""What depends on all gradients of a step together: their joint norm, and whether they are finite."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.native import sums_of_squares
from thalweg.torch.sharding.lockstep import reduced


def squares_of(buckets: Sequence[Bucket], *, native: bool) -> list[Tensor]:
    """By bucket, sums of squares of whole gradients: in float64 or, infinite where that overflows, in float32."""
    wide = [torch.float64 if bucket.grads[0].dtype == torch.float64 else torch.float32 for bucket in buckets]
    sums = sums_of_squares([g for bucket in buckets for g in bucket.grads]) if native else None
    if sums is not None:
        parts = torch.split(sums, [len(bucket.grads) for bucket in buckets])
        own = [squares.to(kind) for squares, kind in zip(parts, wide, strict=True)]
    else:
        own = [squares_in(bucket.grads, kind) for bucket, kind in zip(buckets, wide, strict=True)]
    groups = [bucket.parts[0].across(None) if bucket.parts else () for bucket in buckets]
    return reduced("sum", list(zip(own, groups, strict=True)))


def squares_in(grads: Sequence[Tensor], kind: torch.dtype) -> Tensor:
    if any(type(g) is not Tensor for g in grads):  # torch may not sum lists of tensor subclasses
        return torch.stack([torch.linalg.vector_norm(g, dtype=kind) for g in grads]).square()
    return squares_of_each(grads, kind)


def scale_to(limit: float, squares: Tensor) -> Tensor:
    """What brings the joint norm down to a limit; joined in float64, so that nothing overflows on the way."""
    return 1 / torch.clamp(squares.to(torch.float64).sum().sqrt() / limit, min=1.0)


def check_all_finite(names: Sequence[str], finite: Tensor) -> None:
    guilty = [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]
    if guilty:
        raise NonFiniteError(f"the gradient is not finite, or too large to be squared: {', '.join(map(repr, guilty))}")
