"""Parameters that are stepped together, and the results of their step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.chunks import CHUNK, extent, pieces
from thalweg.settings import Setting
from thalweg.spaces.sharded import Part

T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together: of one group, setting, kind, place, dtype, lr and step."""

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    setting: Setting
    lr: float | Tensor | None
    #: The number of this step where the host knows it; None: it is in the states, on the device.
    t: int | None
    #: Multiplies the step size that the rule computes from lr.
    lr_scale: float = 1.0
    #: Why native code or a fused kernel cannot step them; "" if it can.
    unserved: str = ""
    #: Whether kernels for GPUs would be the ones to step them.
    on_gpu: bool = False
    #: The place of their parameter group.
    group: int = 0
    #: The shard that this rank has of each parameter, if they are sharded; empty if they are whole.
    parts: Sequence[Part] = ()
    #: Multiplies all gradients.
    grad_scale: Tensor | None = None
    #: Whether the whole step may be taken, where that is decided by all gradients together.
    allowed: Tensor | None = None

    @property
    def shape(self) -> Shape:
        """Of the first parameter as a whole: all are of one kind."""
        return self.parts[0].shape if self.parts else tuple(self.params[0].shape)

    @torch.compiler.disable
    def chunks(self, limit: int = CHUNK) -> list[Bucket]:
        """Chunks of at most so many elements, or of a single larger tensor."""
        extents = (
            extent(p.numel(), (entry.numel() for entry in s.values()))
            for p, s in zip(self.params, self.states, strict=True)
        )
        return [self.chosen(members) for members in pieces(extents, limit)]

    def part(self, start: int, end: int) -> Bucket:
        return self.chosen(range(start, end))

    def chosen(self, members: Sequence[int]) -> Bucket:
        def some(values: Sequence[T]) -> list[T]:
            return [values[i] for i in members]

        return replace(
            self,
            names=some(self.names),
            params=some(self.params),
            grads=some(self.grads),
            states=some(self.states),
            parts=some(self.parts) if self.parts else (),
        )


@dataclass(frozen=True)
class Result:
    """New values for a bucket, or for a part of it."""

    #: The part that is stepped, of the same bucket.
    part: Bucket
    params: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    #: One truth value for each parameter; None under ``on_nonfinite="propagate"``.
    finite: Sequence[Tensor] | None
    stats: Mapping[str, Any]
