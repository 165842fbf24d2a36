"""What depends on all gradients of a step together: by what they are scaled, and whether the step is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.native import sums_of_squares
from thalweg.torch.sharding.collectives import summed


class JointGradient:
    """The gradients of an optimizer's steps, seen as one vector."""

    def __init__(self) -> None:
        #: The parameters of the last step under ``on_nonfinite="skip"``, and which of their gradients were finite.
        self.last_finite: tuple[Sequence[str], Tensor] | None = None
        #: How many steps were skipped.
        self.skips: Tensor | None = None

    def joined(
        self,
        buckets: list[Bucket],
        *,
        limit: float | None,
        on_nonfinite: str,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        native: bool,
    ) -> list[Bucket]:
        """Buckets with what all gradients together decide.

        limit: of the norm. grad_scale, found_inf: what a GradScaler leaves to the step. native: sum by native code.
        """
        unscale = None if grad_scale is None else grad_scale.double().reciprocal().reshape(())
        allowed = None if found_inf is None else (found_inf == 0).reshape(())
        scale = unscale
        if buckets and (limit is not None or on_nonfinite == "skip"):
            squares = squares_of(buckets, native=native)
            every = torch.cat([each.to(squares[0].device, torch.float64) for each in squares])
            finite = torch.cat([torch.isfinite(each).to(squares[0].device) for each in squares])
            names = [name for bucket in buckets for name in bucket.names]
            if on_nonfinite == "raise":
                check_all_finite(names, finite)
            if limit is not None:
                scale = scale_to(limit, every if unscale is None else every * unscale.square())
                scale = scale if unscale is None else scale * unscale
            if on_nonfinite == "skip":
                self.last_finite = names, finite
                allowed = finite.all() if allowed is None else finite.all() & allowed
                skipped = (~allowed).to(torch.int64)
                self.skips = skipped if self.skips is None else self.skips + skipped
        if scale is None and allowed is None:
            return buckets

        def at_home(value: Tensor | None, bucket: Bucket) -> Tensor | None:
            return None if value is None else value.to(bucket.params[0].device)

        return [
            replace(bucket, grad_scale=at_home(scale, bucket), allowed=at_home(allowed, bucket)) for bucket in buckets
        ]

    def nonfinite(self) -> list[str]:
        if self.last_finite is None:
            return []
        names, finite = self.last_finite
        return [name for name, fine in zip(names, finite.tolist(), strict=True) if not fine]


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
    return summed(list(zip(own, groups, strict=True)))


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
