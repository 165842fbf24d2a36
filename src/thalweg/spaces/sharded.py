"""The sharded space: a list of torch tensors of which each rank holds a part.

Arithmetic is that of ``spaces.foreach`` on the local parts. What differs is what a tensor is as a whole: its shape, the
positions of its elements, how many of them there are, and sums, which go over all ranks that share an axis. All sums of
one call are handed over together, so that they can be one round of communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from thalweg.arrays import Axes, Scalar, Shape, Squares, Term, count
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


class NoExchange:
    """For a rank that exchanges nothing."""

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
    #: The groups of ranks that hold the same block and divide the work on whole tensors.
    replicas: tuple[Group, ...] = ()

    @property
    def position(self) -> int:
        """The position of the first element in the whole tensor, read row by row."""
        return sum(begin * math.prod(self.shape[axis + 1 :]) for axis, begin in enumerate(self.offset))

    def of_stack(self, held: Shape, stacked_axes: int) -> Part:
        """The same part of a stack of no other tensors than this rank has. held: the shape of the block."""
        stacked, rest = slice(stacked_axes), slice(stacked_axes, None)
        offset, groups = (0,) * stacked_axes, ((),) * stacked_axes
        return replace(
            self,
            shape=(*held[stacked], *self.shape[rest]),
            offset=(*offset, *self.offset[rest]),
            groups=(*groups, *self.groups[rest]),
        )

    def across(self, axes: Axes) -> tuple[Group, ...]:
        """The groups over which a sum along these axes goes."""
        chosen = range(len(self.shape)) if axes is None else [axis % len(self.shape) for axis in axes]
        return tuple(dict.fromkeys(group for axis in chosen for group in self.groups[axis]))


class ReducedList(TensorList):
    """Tensors that were reduced over some axes, and are equal on every rank of these axes' groups."""

    def __init__(self, tensors: Sequence[Tensor], axes: tuple[int, ...]) -> None:
        super().__init__(tensors)
        self.axes = axes


@dataclass(frozen=True)
class Partial:
    """A reduction of what this rank holds of a list of tensors, to be completed over ranks."""

    kind: Literal["sum", "max"]
    local: PerTensor | TensorList
    #: Over which ranks; none: it is complete.
    groups: tuple[Group, ...]
    #: What a mean is divided by, for each tensor.
    counts: Sequence[float] | None = None

    @property
    def asked(self) -> list[Asked]:
        entries = (self.local.values,) if isinstance(self.local, PerTensor) else self.local.tensors
        return [(entry, self.groups) for entry in entries]

    def complete(self, whole: Iterator[Tensor]) -> Any:
        """The reduction over all ranks, from the next figures of an answer to ``asked``."""
        if isinstance(self.local, PerTensor):
            values = next(whole)
            return PerTensor(
                values if self.counts is None else torch.stack(torch._foreach_div(values.unbind(), self.counts))
            )
        tensors = [next(whole) for _ in self.local.tensors]
        return TensorList(tensors if self.counts is None else torch._foreach_div(tensors, self.counts))


class Sharded:
    """The space of a list of parts that are divided alike: over the same groups, axis by axis."""

    def __init__(self, parts: Sequence[Part], exchange: Exchange | None = None) -> None:
        self.parts, self.exchange = parts, exchange or NoExchange()

    def __getattr__(self, name: str) -> Any:
        return getattr(foreach, name)  # all that one part can do by itself

    def shape(self, x: Any) -> Shape:
        """The shape of the first tensor as a whole; a rule asks for it of parameters alone."""
        return self.parts[0].shape

    def astype(self, x: Any, dtype: str) -> Any:
        converted = foreach.astype(x, dtype)
        return ReducedList(converted.tensors, x.axes) if isinstance(x, ReducedList) else converted

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

    # ---- reductions: of what this rank holds, then of all ranks

    def partial(self, op: str, x: Any, axes: tuple[int, ...]) -> Partial:
        """The part of this rank in a reduction of a traced rule. Over all axes it is one number for each tensor."""
        over = None if len(axes) == len(self.parts[0].shape) else axes
        if op == "amax":
            return self.largest(x, over)
        return self.total(Squares(x, over) if op.endswith("squares") else (x, over), averaged=op.startswith("mean"))

    def total(self, term: Term, *, averaged: bool) -> Partial:
        x, axes = term
        groups = () if isinstance(x, PerTensor | ReducedList) else self.parts[0].across(axes)
        # how many elements the whole tensors have along the axes, wherever they are
        counts = [float(count(part.shape, axes)) for part in self.parts] if averaged else None
        return Partial("sum", foreach.sums(term)[0], groups, counts)

    def largest(self, x: Any, axes: Axes) -> Partial:
        """The largest number, infinite where there is NaN: not every library would pass NaN on."""
        local = foreach.amax(x, axes)
        bounded = foreach._apply(lambda x: torch.nan_to_num(x, nan=math.inf, posinf=math.inf), local)
        return Partial("max", bounded, self.parts[0].across(axes))

    def complete(self, partials: Sequence[Partial]) -> tuple[Scalar, ...]:
        exchange = self.exchange.summed if partials[0].kind == "sum" else self.exchange.largest
        completed = iter(exchange([asked for partial in partials for asked in partial.asked]))
        return tuple(partial.complete(completed) for partial in partials)

    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        return self.complete([self.total(term, averaged=False) for term in terms])

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        return self.complete([self.total(term, averaged=True) for term in terms])

    def amax(self, x: Any, axes: Axes) -> Scalar:
        """The largest number of all ranks."""
        return self.complete([self.largest(x, axes)])[0]

    def largest_magnitude(self, x: Any, axes: Axes) -> Scalar:
        return self.amax(foreach.abs(x), axes)
