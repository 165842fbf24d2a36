"""What every engine is given, parameters that are stepped together, and what it does with them in a step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.chunks import CHUNK, extent, pieces
from thalweg.programs.budget import entry_bytes, state_entries
from thalweg.rules.entries import Count, Spread
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Part
from thalweg.storage import Kept
from thalweg.torch.sharding.collectives import Computation

T = TypeVar("T")
EngineKind: TypeAlias = Literal["lists", "native", "triton"]
#: Fused code keeps an address table and partial sums: bytes of each tensor, and this part of a tensor in float32.
BYTES_OF_TABLE, PART_OF_SUMS = 2048, 1 / 128
#: Where it sums along rows and columns: bytes of each of them, and this part of the tensor.
BYTES_OF_LINE, PART_OF_LINES = 64, 1 / 16


class Decision(Protocol):
    """What all gradients of a step decide together."""

    def key(self) -> Hashable:
        """What its launches depend on."""

    def take(self, squares: Tensor) -> None:
        """Decide, by the squares of each gradient."""

    def commit(self) -> None:
        """Remember what was decided."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that are stepped together: of one group, setting, kind, place, dtype, lr and step."""

    names: Sequence[str]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    states: Sequence[Mapping[str, Tensor]]
    setting: ParameterOptions
    lr: float | Tensor | None
    #: The number of this step where the host knows it; None: it is in the states, on the device.
    t: int | None
    #: Multiplies the step size that the rule computes from lr.
    lr_scale: float = 1.0
    #: The name of the way in which they are stepped, as ``optimizer.engine`` tells it, and the engine that does it.
    way: str = "reference"
    engine: EngineKind = "lists"
    #: Why that is not fused code, "" if it is.
    refused: str = ""
    on_gpu: bool = False
    #: The place of their parameter group.
    group: int = 0
    #: The shard that this rank has of each parameter, if they are sharded; empty if they are whole.
    parts: Sequence[Part] = ()
    #: Where the gradients are, if they are stored like those that the step was laid out for; None: ask each.
    addresses: array[int] | None = None
    #: Multiplies all gradients.
    grad_scale: Tensor | None = None
    #: Whether the whole step may be taken, where that is decided by all gradients together.
    allowed: Tensor | None = None
    #: What decides both when it is time to write, if that is left to a run that measures gradients.
    decision: Decision | None = None

    @property
    def shape(self) -> Shape:
        """The shape of the first parameter as a whole: all are of one kind."""
        return self.parts[0].shape if self.parts else tuple(self.params[0].shape)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of the boundary that are the same for every parameter."""
        return dict(lr=self.lr, lr_scale=self.lr_scale, grad_scale=self.grad_scale, allowed=self.allowed)

    @property
    def rate(self) -> dict[str, float | Tensor]:
        """The step size, as statistics tell it."""
        return {} if self.lr is None else {"lr": self.lr * self.lr_scale}

    def renewed(self, **news: Any) -> Bucket:
        """The same with some other values, without the time that ``replace`` takes."""
        same = object.__new__(Bucket)
        same.__dict__.update(self.__dict__, **news)
        return same

    def chunks(self, limit: int = CHUNK) -> list[Bucket]:
        """Chunks of at most so many elements, or of a single larger tensor."""
        return [self.chosen(members) for members in pieces(self.extents, limit)]

    @property
    def extents(self) -> list[int]:
        """The elements for which each parameter counts where chunks are cut."""
        return [
            extent(p.numel(), (entry.numel() for entry in s.values()))
            for p, s in zip(self.params, self.states, strict=True)
        ]

    def alike(self) -> list[list[int]]:
        """Members for which the host decides the same, by the counts that it keeps."""
        by_counts: dict[tuple[float, ...], list[int]] = {}
        counts = self.setting.rule.keys(self.shape, Count)
        for index, s in enumerate(self.states):
            by_counts.setdefault(tuple(float(s[key]) for key in counts), []).append(index)
        return list(by_counts.values())

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
            addresses=None if self.addresses is None else array("Q", some(self.addresses)),
        )


class Foreseen(NamedTuple):
    """A parameter as it will be stepped, or the shard of one: what an engine is asked about before there is memory."""

    shape: Shape
    dtype: str
    setting: ParameterOptions
    #: ``meta`` stands for a GPU that has kernels.
    device: torch.device

    @property
    def entries(self) -> Mapping[str, Kept]:
        return state_entries(self.setting, self.shape, self.dtype)

    @property
    def extent(self) -> int:
        """The elements by which engines cut lists into chunks."""
        return extent(math.prod(self.shape), (math.prod(shape) for shape, _ in self.entries.values()))

    @property
    def value_bytes(self) -> int:
        """The bytes of a new parameter with its new state."""
        return sum(map(entry_bytes, [(self.shape, self.dtype), *self.entries.values()]))

    @property
    def table_bytes(self) -> int:
        """The bytes that fused code keeps for it from step to step, at most."""
        rule, size = self.setting.rule_at(1), 4 * math.prod(self.shape)
        declared = rule.entries(self.shape).values()
        summed = [entry for entry in declared if isinstance(entry, Spread) and entry.over]
        lines = sum(math.prod(entry.shape(self.shape, rule.stacked_axes)) for entry in summed)
        part = PART_OF_SUMS + (PART_OF_LINES if summed else 0)
        slices = math.prod(self.shape[: rule.stacked_axes])
        return BYTES_OF_TABLE * slices + BYTES_OF_LINE * lines + math.ceil(part * size)


def count_largest(needed: Sequence[tuple[Foreseen, int]], chunk: int) -> int:
    """Bytes of the largest chunk of so many elements, or of one tensor that is larger. needed: those of each."""
    densest = max((bytes_ / p.extent for p, bytes_ in needed), default=0.0)
    sizes = [bytes_ for _, bytes_ in needed]
    return min(sum(sizes), max(0, *sizes, math.ceil(chunk * densest)))


#: By name, what gives the statistics of a parameter's last step.
Statistics: TypeAlias = dict[str, Callable[[], dict[str, Any]]]


class Run(Protocol):
    """Buckets as an engine steps them: laid out once, taken again and again."""

    #: Whether it finds the squares of gradients when it is time to write, for the ``decision`` of its buckets.
    measures_gradients: bool

    @property
    def recorded(self) -> int:
        """How many kinds of its steps are replayed, and not launched kernel by kernel."""

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Take the gradients and numbers of a step; nothing is written."""

    def measure(self, on_nonfinite: str) -> Iterable[Computation]:
        """All that comes before writing; the computations yield the sums to be completed over ranks.

        on_nonfinite: unless it is "propagate", nothing is written before all is known to be finite.
        """

    def nonfinite(self) -> list[str]:
        """The parameters whose step is not finite, after :meth:`measure` with "raise". Waits for the device."""

    def write(self) -> Statistics:
        """Write parameters and state, in place."""

    def release(self, *, taken: bool) -> None:
        """Let go of gradients and of what one step alone has. taken: whether it was written."""


class Engine(Protocol):
    """An engine of one optimizer, with what outlives the steps that it lays out."""

    def lay_out(self, buckets: Sequence[Bucket]) -> Run:
        """Lay out the steps of these buckets."""

    def count_temporaries(self, params: Sequence[Foreseen]) -> int:
        """Bytes that it needs at most to step these, beside them, their gradients and their state."""

    def forget(self) -> None:
        """State was replaced: drop what was remembered of it."""
