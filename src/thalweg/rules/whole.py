"""Rules that need whole tensors: a step in three parts, of which only the middle one has to see a tensor as a whole.

Where a parameter is sharded over ranks, each rank prepares and applies on its own shard, and one rank, the owner of
the parameter, transforms. Several parameters of one shape are transformed as one stack.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from thalweg.arrays import A, Scalar, Shape, Space, State, Truth
from thalweg.dtypes import DTYPES
from thalweg.rules.entries import PerSlice
from thalweg.rules.rule import Noise, Rule, Update


class Preparation(NamedTuple):
    """What :meth:`WholeRule.prepare` returns."""

    #: What has to be seen as a whole: arrays of the parameter's shape, in one dtype.
    tensors: tuple[Any, ...]
    #: The state so far.
    state: State[Any]
    #: Whether this step changes entries with a shape of their own (factors); or a number that says in which way.
    due: Truth = True


class Direction(NamedTuple):
    """What :meth:`WholeRule.transform` returns."""

    #: An array of the parameter's shape.
    tensor: Any
    #: Numbers by name, those of ``Rule.FIGURES``, each in the shape that ``figure_shape`` tells.
    figures: dict[str, Scalar]
    #: The entries with a shape of their own.
    state: State[Any]
    #: What :meth:`WholeRule.keep` would make of these entries, if ``transform`` had to compute it anyway.
    kept: State[Any] = {}


#: The methods of rules of thalweg 0.2.0, with their names now: a rule that defines one of those is refused.
FORMER_NAMES = {
    "shown": "prepare",
    "made": "transform",
    "taken": "apply",
    "tensors_shown": "whole_tensors",
    "dtype_shown": "whole_dtype",
}


@dataclass(frozen=True, kw_only=True)
class WholeRule(Rule):
    """A rule that needs whole tensors: :meth:`prepare`, :meth:`transform` and :meth:`apply` make its update."""

    needs_whole: ClassVar[bool] = True
    #: Whether entries with a shape of their own change in every step, whatever is due.
    learns_always: ClassVar[bool] = False
    #: The names of the numbers that ``transform`` computes for ``apply``.
    FIGURES: ClassVar[tuple[str, ...]] = ()
    #: Whether ``prepare`` reads the gradient and the state alone and ``apply`` the direction and the parameter alone,
    #: with figures that decide nothing but ``finite``: then fused code can be made of both.
    IN_PARTS: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, xp: Space[A], g: A, s: State[A], p: A, t: Scalar) -> Preparation:
        """Element by element, with sums if need be: what has to be seen as a whole, and the new state so far."""

    @abstractmethod
    def transform(
        self, xp: Space[A], tensors: tuple[A, ...], s: State[A], *, due: Truth = True, noise: Noise[A] | None = None
    ) -> Direction:
        """Compute the direction of the step from whole tensors.

        tensors: those of :meth:`prepare`. s: the entries with a shape of their own, as they were before the step.
        """

    @abstractmethod
    def apply(
        self, xp: Space[A], direction: Direction, s: State[A], p: A, state: State[A], *, due: Truth, lr: Scalar
    ) -> Update:
        """Element by element: the step. state: the new one, as far as the other two parts have computed it."""

    def keep(self, xp: Space[A], s: State[A], shape: Shape) -> State[A]:
        """What ``transform`` computes from entries with a shape of their own alone, so that engines may keep it.

        Until these entries change, such engines pass it to ``transform`` as ``kept``. Empty: there is nothing to keep.
        """
        return {}

    def refresh(
        self, xp: Space[A], states: Sequence[State[A]], shapes: Sequence[Shape], most: float = math.inf
    ) -> Iterator[tuple[int, State[A]]]:
        """Change the entries with a shape of their own of many tensors: yields a tensor's index and its new entries.

        That is what ``transform`` does, after the direction, where 1 is due. An engine that has many tensors calls
        ``transform`` with ``due=False`` for each, and then this. most: how many elements to work on together.
        """
        yield from ()

    @classmethod
    def refreshes_apart(cls) -> bool:
        """Whether there is a ``refresh`` that does as ``transform``: not where a subclass has a ``transform`` alone."""
        transforming = next(base for base in cls.__mro__ if "transform" in vars(base))
        refreshing = next(base for base in cls.__mro__ if "refresh" in vars(base))
        return refreshing is not WholeRule and issubclass(refreshing, transforming)

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        prepared = self.prepare(xp, g, s, p, t)
        direction = self.transform(xp, prepared.tensors, s, due=prepared.due, noise=noise)
        state = {**prepared.state, **direction.state}
        return self.apply(xp, direction, s, p, state, due=prepared.due, lr=lr * lr_scale)

    def figure_shape(self, shape: Shape) -> Shape:
        """The shape of each figure for a parameter of this shape: one number for each tensor of a stack."""
        return (math.prod(shape[: self.stacked_axes]),)

    def cost(self, shape: Shape) -> int:
        """About how many multiplications ``transform`` takes: by this, work is balanced over ranks."""
        return math.prod(shape)

    def refresh_share(self) -> float:
        """About the fraction of steps in which entries with a shape of their own change, and are sent."""
        return 1.0

    def goes_in_parts(self) -> bool:
        """Whether what ``IN_PARTS`` says holds with these options; the host may still have to count steps."""
        return self.IN_PARTS

    def show_figures(self, xp: Space[A], figures: dict[str, Scalar], due: Truth) -> dict[str, Scalar]:
        """Figures as statistics show them."""
        return figures

    def whole_tensors(self) -> int:
        """How many tensors of the parameter's size have to be seen as a whole."""
        return 1

    def whole_dtype(self, arithmetic: str) -> str:
        """The dtype of these tensors and of the direction, for a parameter that is computed in this precision."""
        return arithmetic

    def count_temporaries(self) -> int:
        """How many numbers of this dtype ``transform`` has alive for each element, at most; ``explain()`` shows it."""
        return 16

    def has_whole_slices(self, shape: Shape, sharded: Collection[int]) -> bool:
        """Whether a rank can transform what it has of a stack that is sharded along these axes among others."""
        return any(axis < self.stacked_axes for axis in sharded) and self.is_stackable(shape)

    def is_stackable(self, shape: Shape) -> bool:
        """Whether ``transform`` can take several parameters as one stack: it needs the prepared tensors alone."""
        return not self.needs_noise and not self.keys(shape, PerSlice)


# ---- which rank owns which tensor


#: The work of each rank of each replica: the cost, the rank, the replica.
Loads: TypeAlias = list[tuple[int, int, int]]


def no_loads(ranks: int, replicas: int = 1) -> Loads:
    return [(0, rank, replica) for rank in range(ranks) for replica in range(replicas)]


def owners_of(tensors: Sequence[tuple[str, int]], loads: Loads) -> list[tuple[int, int]]:
    """The replica that owns each tensor, and the rank in it: the costliest first, to the rank with the least work.

    tensors: names and costs. loads: the work that ranks have already, to which this is added.
    """
    owners = [(0, 0)] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i][1], tensors[i][0])):
        load, rank, replica = loads[0]
        owners[index] = replica, rank
        heapq.heapreplace(loads, (load + tensors[index][1], rank, replica))
    return owners


#: Elements that an owner receives at a time: while it transforms these, the next arrive.
SLOT = 2**25


def slots_of(tensors: Sequence[tuple[Hashable, int]], most: int = SLOT) -> list[list[int]]:
    """The indices of tensors that travel together: for each owner at most so many elements, or one larger tensor.

    tensors: of each its owner and how many elements it has.
    """
    slots: list[list[int]] = []
    filled: dict[Hashable, tuple[int, int]] = {}
    for index, (owner, elements) in enumerate(tensors):
        slot, load = filled.get(owner, (0, 0))
        if load and load + elements > most:
            slot, load = slot + 1, 0
        filled[owner] = slot, load + elements
        if slot == len(slots):
            slots.append([])
        slots[slot].append(index)
    return slots


#: How many multiplications a rank makes while a byte arrives, about: 300 TFLOPS at 75 GB/s, or 100 GFLOPS at 1 GB/s.
MEANWHILE = {"cuda": 2000, "cpu": 50}


def is_worth_sending(rule: WholeRule, shape: Shape, arithmetic: str, device: str) -> bool:
    """Whether a rank gets a direction sooner from another rank that has all it needs than by its own work."""
    entries = [entry for entry in rule.entries(shape).values() if isinstance(entry, PerSlice)]
    factors = sum(math.prod(entry.shape(shape, rule.stacked_axes)) for entry in entries)
    size = DTYPES[rule.whole_dtype(arithmetic)].bytes * (math.prod(shape) + rule.refresh_share() * factors)
    return rule.cost(shape) >= MEANWHILE.get(device, MEANWHILE["cuda"]) * size


def is_remembered(on_nonfinite: str) -> bool:
    """Whether owners keep whole factors from step to step: not if a step may turn out not to be taken."""
    return on_nonfinite == "propagate"
