"""Gradients: checked, laid out like their parameters, and seen together, which decides how they are scaled and whether
a step is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from thalweg.errors import NonFiniteError, ParameterError
from thalweg.rules.spikes import Judgement, Spikes, judge
from thalweg.spaces import torch as single
from thalweg.spaces.torch_sums import squares_of_each
from thalweg.storage import SPIKES
from thalweg.torch.engines.native import sums_of_squares
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.params.checks import NAMES
from thalweg.torch.sharding.collectives import summed
from thalweg.torch.sharding.shards import is_distributed


def gradient_of(name: str, p: Tensor, g: Tensor) -> Tensor:
    """The gradient of a parameter, or this rank's shard of it; raise if it does not fit."""
    check_gradient(name, p, g)
    return gradient_like(name, p, g)


def check_gradient(name: str, p: Tensor, g: Tensor) -> None:
    if g.layout is not torch.strided:
        raise ParameterError(
            f"the gradient of {name!r} is sparse ({g.layout}): make it dense (for an embedding: sparse=False), "
            "or leave this parameter to torch.optim.SparseAdam"
        )
    if g.dtype not in NAMES:
        raise ParameterError(
            f"the gradient of {name!r} has dtype {g.dtype}: it must be float32, float64, bfloat16 or float16"
        )
    if g.shape != p.shape:
        raise ParameterError(
            f"the gradient of {name!r} has shape {tuple(g.shape)}, and its parameter {tuple(p.shape)}: "
            "they must be equal"
        )
    if g.device != p.device:
        raise ParameterError(
            f"the gradient of {name!r} is on {g.device}, and its parameter on {p.device}: "
            "they must be on the same device"
        )


def gradient_like(name: str, p: Tensor, g: Tensor) -> Tensor:
    """A gradient with the placements of its parameter: partial sums are reduced, and other placements redistributed."""
    if not is_distributed(p):
        if is_distributed(g):
            raise ParameterError(
                f"the gradient of {name!r} is a DTensor and its parameter is not: both must be DTensors, or neither"
            )
        return g
    if not is_distributed(g):
        raise ParameterError(
            f"the parameter {name!r} is a DTensor and its gradient is not: both must be DTensors, or neither"
        )
    if g.device_mesh != p.device_mesh:  # type: ignore[attr-defined]
        raise ParameterError(
            f"the gradient of {name!r} is on another device mesh than its parameter: both must be on the same mesh"
        )
    if g.placements != p.placements:  # type: ignore[attr-defined]
        g = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    return g.to_local()  # type: ignore[attr-defined, no-any-return]


class JointGradient:
    """The gradients of an optimizer's steps, seen as one vector."""

    def __init__(self) -> None:
        #: The parameters of the last step under ``on_nonfinite="skip"``, and which of their gradients were finite.
        self.last_finite: tuple[Sequence[str], Tensor] | None = None
        #: How many steps were skipped.
        self.skips: Tensor | None = None
        #: What is kept of former norms, as all parameters have it in their state; how the last one was judged; and
        #: whether that is still to be kept.
        self.norms: Tensor | None = None
        self.judgement: Judgement | None = None
        self.is_pending = False

    def share_norms(self, states: Iterable[dict[str, Tensor]]) -> None:
        """Make what the states of parameters have of former norms one tensor. It is the same in all of them."""
        own = [state for state in states if SPIKES in state]
        self.norms = own[0][SPIKES] if own else None
        for state in own:
            state[SPIKES] = own[0][SPIKES]

    def join_gradients(
        self,
        buckets: list[Bucket],
        *,
        limit: float | None,
        spikes: Spikes | None,
        on_nonfinite: str,
        grad_scale: Tensor | None,
        found_inf: Tensor | None,
        native: bool,
        in_order: Callable[[Iterable[str]], list[str]],
    ) -> list[Bucket]:
        """Buckets with what all gradients together decide.

        limit: of the norm. grad_scale, found_inf: what a GradScaler leaves to the step. native: sum by native code.
        """
        unscale = None if grad_scale is None else grad_scale.double().reciprocal().reshape(())
        allowed = None if found_inf is None else (found_inf == 0).reshape(())
        scale = unscale
        if buckets and (limit is not None or spikes or on_nonfinite == "skip"):
            squares = squares_of(buckets, native=native)
            every = torch.cat([each.to(squares[0].device, torch.float64) for each in squares])
            finite = torch.cat([torch.isfinite(each).to(squares[0].device) for each in squares])
            names = [name for bucket in buckets for name in bucket.names]
            if on_nonfinite == "raise":
                check_all_finite(names, finite, in_order)
            guards, factors = [] if allowed is None else [allowed], []
            if limit is not None or spikes:
                norm = (every if unscale is None else every * unscale.square()).sum().sqrt()
                if limit is not None:
                    factors.append(scale_to(limit, norm))
                if spikes:
                    judgement = self.judge_norm(spikes, norm)
                    if spikes.action == "skip":
                        guards.append(~judgement.is_spike.reshape(()))
                    else:
                        factors.append(judgement.scale.reshape(()))
            if on_nonfinite == "skip":
                self.last_finite = names, finite
                guards.append(finite.all())
            if factors:
                factor = functools.reduce(torch.minimum, factors)
                scale = factor if unscale is None else factor * unscale
            if guards:
                allowed = torch.stack([guard.to(every.device) for guard in guards]).all()
                if on_nonfinite == "skip" or (spikes and spikes.action == "skip"):
                    skipped = (~allowed).to(torch.int64)
                    self.skips = skipped if self.skips is None else self.skips + skipped
        if scale is None and allowed is None:
            return buckets

        def at_home(value: Tensor | None, bucket: Bucket) -> Tensor | None:
            return None if value is None else value.to(bucket.params[0].device)

        return [
            replace(bucket, grad_scale=at_home(scale, bucket), allowed=at_home(allowed, bucket)) for bucket in buckets
        ]

    def judge_norm(self, spikes: Spikes, norm: Tensor) -> Judgement:
        assert self.norms is not None
        self.judgement = judge(single, spikes, norm.to(self.norms.device).reshape(1), self.norms)
        self.is_pending = True
        return self.judgement

    def commit(self) -> None:
        """Remember a norm: its step is taken, or skipped."""
        if self.is_pending and self.norms is not None and self.judgement is not None:
            self.norms.copy_(self.judgement.kept)
        self.is_pending = False

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


def scale_to(limit: float, norm: Tensor) -> Tensor:
    """What brings the joint norm down to a limit."""
    return 1 / torch.clamp(norm / limit, min=1.0)


def check_all_finite(names: Sequence[str], finite: Tensor, in_order: Callable[[Iterable[str]], list[str]]) -> None:
    guilty = in_order(name for name, fine in zip(names, finite.tolist(), strict=True) if not fine)
    if guilty:
        raise NonFiniteError(f"the gradient is not finite, or too large to be squared: {', '.join(map(repr, guilty))}")
