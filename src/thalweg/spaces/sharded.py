"""The sharded space: a list of torch tensors of which each rank holds a part.

Arithmetic is that of ``spaces.foreach`` on the local parts. What differs is what a tensor is as a whole: its shape, the
positions of its elements, how many of them there are, and sums, which go over all ranks that share an axis. All sums of
one call are handed over together, so that they can be one round of communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from thalweg.arrays import Axes, Scalar, Shape, Term, count
from thalweg.spaces import foreach
from thalweg.spaces.foreach import PerTensor, TensorList

#: What stands for a set of ranks in a reduction; the front end knows what it is.
Group: TypeAlias = Any
#: A local figure, and the groups over which it is to be reduced.
Asked: TypeAlias = tuple[Tensor, tuple[Group, ...]]


class Exchange(Protocol):
    """What ranks tell each other; each call is one round of communication."""

    def summed(self, asked: Sequence[Asked]) -> list[Tensor]: ...

    def largest(self, asked: Sequence[Asked]) -> list[Tensor]: ...


class Alone:
    """For a rank that has nobody to ask, or nothing to ask for."""

    def summed(self, asked: Sequence[Asked]) -> list[Tensor]:
        return [tensor for tensor, _ in asked]

    largest = summed


@dataclass(frozen=True)
class Part:
    """The part of a tensor that this rank holds: a block of it, perhaps an empty one."""

    #: Of the whole tensor.
    shape: Shape
    #: Where the block begins, axis by axis.
    offset: Shape
    #: By axis, the groups of ranks over which it is divided.
    groups: tuple[tuple[Group, ...], ...]

    def across(self, axes: Axes) -> tuple[Group, ...]:
        """The groups over which a sum along these axes goes."""
        chosen = range(len(self.shape)) if axes is None else [axis % len(self.shape) for axis in axes]
        return tuple(dict.fromkeys(group for axis in chosen for group in self.groups[axis]))


class ReducedList(TensorList):
    """Tensors that are the same on every rank along some axes, which they have no longer: sums over those are made."""

    def __init__(self, tensors: Sequence[Tensor], axes: tuple[int, ...]) -> None:
        super().__init__(tensors)
        self.axes = axes


class Sharded:
    """The space of a list of parts that are divided alike: over the same groups, axis by axis."""

    def __init__(self, parts: Sequence[Part], exchange: Exchange | None = None) -> None:
        self.parts, self.exchange = parts, exchange or Alone()

    def __getattr__(self, name: str) -> Any:
        return getattr(foreach, name)  # all that one part can do by itself

    def shape(self, x: Any) -> Shape:
        """Of the first tensor as a whole; a rule asks for it of parameters alone."""
        return self.parts[0].shape

    def astype(self, x: Any, dtype: str) -> Any:
        made = foreach.astype(x, dtype)
        return ReducedList(made.tensors, x.axes) if isinstance(x, ReducedList) else made

    def zeros_reduced(self, x: TensorList, axes: tuple[int, ...]) -> ReducedList:
        return ReducedList(foreach.zeros_reduced(x, axes).tensors, axes)

    def positions(self, like: TensorList) -> tuple[TensorList, TensorList]:
        """Positions in the whole tensors: random numbers do not depend on who holds them."""
        low, high = [], []
        for tensor, part in zip(like.tensors, self.parts, strict=True):
            index = torch.zeros((), dtype=torch.int64, device=tensor.device)
            for axis, (size, begin) in enumerate(zip(tensor.shape, part.offset, strict=True)):
                stride = math.prod(part.shape[axis + 1 :])
                along = (torch.arange(size, device=tensor.device) + begin) * stride
                index = index + along.reshape([-1] + [1] * (tensor.ndim - axis - 1))
            index = index.expand(tensor.shape)
            low.append(index & 0xFFFFFFFF)
            high.append(index >> 32)
        return TensorList(low), TensorList(high)

    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        local = foreach.sums(*terms)
        asked: list[Asked] = []
        for total, (x, axes) in zip(local, terms, strict=True):
            groups = () if isinstance(x, PerTensor | ReducedList) else self.parts[0].across(axes)
            entries = (total.values,) if isinstance(total, PerTensor) else total.tensors
            asked += [(entry, groups) for entry in entries]
        whole = iter(self.exchange.summed(asked))
        return tuple(
            PerTensor(next(whole)) if isinstance(total, PerTensor) else TensorList([next(whole) for _ in total.tensors])
            for total in local
        )

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        return tuple(self.divided(total, term) for total, term in zip(self.sums(*terms), terms, strict=True))

    def divided(self, total: Any, term: Term) -> Any:
        """A sum over how many elements the whole tensors have along the axes, wherever they are."""
        counts = [float(count(part.shape, term[1])) for part in self.parts]
        if isinstance(total, PerTensor):
            return PerTensor(torch.stack(torch._foreach_div(total.values.unbind(), counts)))
        return TensorList(torch._foreach_div(total.tensors, counts))

    def amax(self, x: Any, axes: Axes) -> Scalar:
        """The largest of all ranks. What is no number counts as infinite: not every library would pass it on."""
        local, groups = foreach.amax(x, axes), self.parts[0].across(axes)
        entries = (local.values,) if isinstance(local, PerTensor) else local.tensors
        bounded = [(torch.nan_to_num(entry, nan=math.inf, posinf=math.inf), groups) for entry in entries]
        whole = self.exchange.largest(bounded)
        return PerTensor(whole[0]) if isinstance(local, PerTensor) else TensorList(whole)
