"""A rank's part of a parameter, without numbers: what is kept for it, needed in a step, and told to other ranks.

The rules themselves say so. They are run on parts as ``spaces.sharded`` runs them: shapes are those of the whole, and
sums along a sharded axis cross ranks. What crosses in one round goes in one message for each mesh dimension.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Axes, Scalar, Term, reduced_shape
from thalweg.plan import gpus
from thalweg.plan.items import Entry, Item, state_entries
from thalweg.plan.models import Tensor
from thalweg.programs.liveness import OfWhole, lifetimes, listed, stepped
from thalweg.rules import Direction, Rule, Update, WholeRule
from thalweg.rules.entries import PerSlice, Square
from thalweg.settings import Setting
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import BYTES, ORDER, Ledger, ShapeOnly
from thalweg.storage import arithmetic, kind


@dataclass(frozen=True)
class Part:
    """What a rank holds of a parameter."""

    whole: Tensor
    held: Tensor
    #: By axis, the mesh dimensions that divide it.
    mesh: tuple[tuple[str, ...], ...]

    def across(self, axes: Axes) -> tuple[str, ...]:
        """The mesh dimensions over which a sum along these axes goes."""
        chosen = range(len(self.mesh)) if axes is None else axes
        return tuple(dict.fromkeys(dimension for axis in chosen for dimension in self.mesh[axis]))

    def without_name(self) -> Part:
        """So that parts of equal shape are known to cost the same."""
        return Part(nameless(self.whole), nameless(self.held), self.mesh)


@dataclass(frozen=True)
class Figures:
    """What a parameter adds to one round."""

    kind: str
    count: int
    dtype: str
    #: The mesh dimensions it crosses.
    mesh: tuple[str, ...]


class PartSpace(OfWhole):
    """The space of shapes for a part of a tensor; it remembers what crosses ranks, round by round."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.whole.shape)
        self.part = part
        self.rounds: list[list[Figures]] = []

    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        self.ask("sum", terms)
        return shapes.sums(*terms)

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        self.ask("sum", terms)
        return shapes.means(*terms)

    def amax(self, x: ShapeOnly, axes: Axes) -> Scalar:
        self.ask("max", [(x, axes)])
        return shapes.amax(x, axes)

    def ask(self, kind: str, terms: Sequence[Term]) -> None:
        asked = []
        for x, axes in terms:
            # what has no axes is one number for a tensor already, and known to all
            crossed = self.part.across(axes) if x.shape else ()
            if crossed:
                count = 1 if axes is None else math.prod(reduced_shape(x.shape, axes))
                asked.append(Figures(kind, count, x.dtype, crossed))
        if asked:
            self.rounds.append(asked)


class OnParts:
    """A rule that needs whole tensors on parts of them; what owners make comes back as arrays of the right shapes."""

    def __init__(self, rule: Rule, ledger: Ledger) -> None:
        assert isinstance(rule, WholeRule)
        self.rule, self.ledger = rule, ledger
        self.entries, self.stacked_axes = rule.entries, rule.stacked_axes
        #: Bytes that are alive while owners work.
        self.waiting = 0

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any) -> Update:
        tensors, state, due = self.rule.prepare(xp, g, s, p, t)
        self.waiting = self.ledger.live - self.ledger.start
        x = tensors[0]
        del tensors
        learned = self.rule.keys(xp.shape(p), PerSlice)
        made = Direction(
            xp.zeros_like(x),
            {key: xp.full((), 0.0, x) for key in self.rule.FIGURES},
            {key: xp.zeros_like(entry) for key, entry in s.items() if key in learned},
        )
        return self.rule.apply(xp, made, s, p, {**state, **made.state}, due=due, lr=lr * lr_scale)


def part_entries(setting: Setting, part: Part) -> dict[str, Entry]:
    """Shape and dtype of what a rank keeps for a parameter."""
    return state_entries(setting, part.held, part.whole.shape)


@functools.lru_cache(maxsize=4096)
def rounds(setting: Setting, part: Part) -> tuple[tuple[Figures, ...], ...]:
    """What a step of one parameter asks of other ranks, round by round."""
    space, ledger = PartSpace(part), Ledger()
    p, g = (ledger.array(part.held.shape, part.held.dtype) for _ in range(2))
    state = {key: ledger.array(*entry) for key, entry in part_entries(setting, part).items()}
    rule = setting.rule_at(1)
    stepped(space, OnParts(rule, ledger) if rule.needs_whole else rule, setting, p, g, state)
    told = list(map(tuple, space.rounds))
    entries = rule.entries(part.whole.shape).values()
    keeps_all = any(isinstance(entry, Square) and not entry.over for entry in entries)
    if (
        keeps_all and len(told) > 1 and told[1][0].kind == "sum"
    ):  # where all squares are kept, those of u need no sum before them
        told[:2] = [told[0] + told[1]]
    return tuple(told)


def rounds_of_kernels(setting: Setting, part: Part) -> list[tuple[Figures, ...]]:
    """The same of kernels for GPUs: all of it is sums."""
    return [tuple(replace(own, kind="sum") for own in figures) for figures in rounds(setting, part.without_name())]


def messages(
    setting: Setting, parts: Sequence[Part], by_kernels: Sequence[bool] | None = None
) -> dict[tuple[int, str, str], int]:
    """Bytes of every message of a step, by round, kind and mesh dimension.

    by_kernels: which parts are stepped by kernels for GPUs.
    """
    asked: list[tuple[int, Figures]] = []
    if setting.handling.max_grad_norm is not None or setting.handling.on_nonfinite == "skip":
        # squares of all gradients, before anything else
        asked += [(0, Figures("sum", 1, arithmetic(part.held.dtype), part.across(None))) for part in parts]
    chosen = by_kernels or [False] * len(parts)
    for part, own in zip(parts, chosen, strict=True):
        passed: Counter[str] = Counter()  # sums are asked for together, and so are maxima
        for told in rounds_of_kernels(setting, part) if own else rounds(setting, part.without_name()):
            passed[told[0].kind] += 1
            asked += [(passed[figures.kind], figures) for figures in told]
    gathered: dict[tuple[int, str, str], list[Figures]] = {}
    for number, figures in asked:
        for dimension in figures.mesh:
            gathered.setdefault((number, figures.kind, dimension), []).append(figures)
    return {key: message_bytes(together) for key, together in gathered.items()}


def nameless(tensor: Tensor) -> Tensor:
    return Tensor("", tensor.shape, tensor.dtype)


def message_bytes(figures: Sequence[Figures]) -> int:
    """All of a message is in the widest of its dtypes."""
    widest = max((own.dtype for own in figures), key=ORDER.index)
    return BYTES[widest] * sum(own.count for own in figures)


def divided_peak(items: Sequence[Item]) -> tuple[int, str]:
    """Bytes at the peak where parameters are sharded.

    Buckets are not cut into chunks, and each waits for the others in the middle of its arithmetic: all that they hold
    is there at once. So this is the sum of their peaks, which no step exceeds, and comes near where one holds most.
    """
    buckets: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        alike = kind(item.setting.rule_at(1), item.setting.handling, item.whole or item.tensor.shape)
        buckets[item.setting, item.tensor.dtype, alike].append(item)
    total = sum(
        listed(lifetimes(item.setting, item.tensor.shape, item.tensor.dtype, whole=item.whole) for item in bucket).peak
        for bucket in buckets.values()
    )
    return total, "foreach"


def kernel_peak(setting: Setting, parts: Sequence[Part], messages: Iterable[int]) -> int:
    """Bytes at the peak where kernels for GPUs step parts in place: what they keep, and the largest message."""
    buckets: dict[Any, list[Part]] = defaultdict(list)
    for part in parts:
        buckets[part.held.dtype, kind(setting.rule_at(1), setting.handling, part.whole.shape), part.mesh].append(part)
    scratch = gpus.scratch_bytes([(setting, [shown(setting, part) for part in bucket]) for bucket in buckets.values()])
    joint = gpus.joint_bytes([[Item(part.held, setting) for part in bucket] for bucket in buckets.values()])
    return scratch + max([joint, *map(gpus.rounded_up, messages)])


def shown(setting: Setting, part: Part) -> gpus.Shown:
    """A part as kernels for GPUs are shown it."""
    whole = part.whole.shape if part.across(None) else None
    return gpus.Shown(part.held.shape, part.held.dtype, part_entries(setting, part), whole)
