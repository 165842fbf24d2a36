"""One tensor around one step, and the same step by the page of a rule: in float64, with what dtypes may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.dtypes import DTYPES
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Count
from thalweg.rules.noise import normal, tensor_id
from thalweg.spaces import numpy as xp

Arr: TypeAlias = npt.NDArray[Any]

#: How far a step may be off, in units of the last place of its arithmetic: it is some ten operations for an element,
#: each off by half a unit, in either of two orders.
UNITS = 16


@dataclass(frozen=True)
class Step:
    """What a step was given for one tensor, and what it made of it: arrays of the host."""

    name: str
    rule: Rule
    before: Arr
    gradient: Arr
    after: Arr
    state: Mapping[str, Arr]
    state_after: Mapping[str, Arr]
    #: The number of the step from 1, the learning rate, and what multiplies the step size and the gradient.
    t: int
    lr: float | None
    lr_scale: float = 1.0
    grad_scale: float = 1.0
    #: The group of the tensor, and the dtypes of the tensor, of its state and of the arithmetic.
    group: int = 0
    dtype: str = "float32"
    state_dtypes: Mapping[str, str] = field(default_factory=dict)
    arithmetic: str = "float32"
    rounding: str = "nearest"
    seed: int = 0
    #: How often the tensor is written in a step, each time rounded to the nearest.
    writes: int = 1

    def run(self, *, is_rough: bool) -> Update:
        """The answer of the page. is_rough: in the precision of the step, given numbers that are off by UNITS of it."""
        wide = "float64" if not is_rough or self.arithmetic == "float64" else "float32"
        rng, off = np.random.default_rng(0), UNITS * DTYPES[self.arithmetic].rounding / 2
        counts = self.rule.keys(self.before.shape, Count)

        def given(x: Arr, key: str = "") -> Arr:
            x = np.asarray(x, wide)
            return (
                x * np.asarray(rng.choice([1 - off, 1 + off], x.shape), wide) if is_rough and key not in counts else x
            )

        p, g = given(self.before), given(self.gradient) * self.grad_scale
        state = {key: given(entry, key) for key, entry in self.state.items()}
        with np.errstate(all="ignore"):
            return self.rule.update(
                xp,
                g,
                state or self.rule.init(xp, p),
                p,
                t=self.t,
                lr=self.lr,
                lr_scale=self.lr_scale,
                noise=lambda: normal(xp, p, seed=self.seed, tensor=tensor_id(self.name), t=self.t),
            )

    @cached_property
    def page(self) -> Update:
        return self.run(is_rough=False)

    @cached_property
    def rough(self) -> Update:
        return self.run(is_rough=True)

    @cached_property
    def move(self) -> Arr:
        move: Arr = np.asarray(self.after, "float64") - np.asarray(self.before, "float64")
        return move

    def compare(self, factor: float = 1.0, shrink: float = 0.0) -> Comparison:
        """The move beside that of the page, taken so many times, less a share of the tensor."""
        before = np.asarray(self.before, "float64")
        delta, rough = (factor * np.asarray(u.delta, "float64") - shrink * before for u in (self.page, self.rough))
        delta, rough = np.broadcast_to(delta, before.shape), np.broadcast_to(rough, before.shape)
        with np.errstate(all="ignore"):
            return self._compare(before, delta, np.abs(rough - delta))

    def _compare(self, before: Arr, delta: Arr, spread: Arr) -> Comparison:
        distance = spacing(np.maximum(np.abs(before), np.abs(before + delta)), self.dtype)
        if self.rounding == "compensated":
            distance = distance * 2.0**-8
        slack = allowance(delta, spread, self.arithmetic) + distance * (self.writes - 1) / 2
        is_finite = np.isfinite(delta)
        aims, jumps = before + delta, int((spread > np.maximum(np.abs(delta) / 2, slack / 2)).sum())
        inside = is_between(np.asarray(self.after, "float64"), aims, slack, distance, self.rounding)
        outside = int((~inside & is_finite).sum())
        size = norm(delta) or norm(self.move) or 1.0
        return Comparison(
            fits=outside <= jumps and bool(is_finite.all()),
            off=norm(self.move - delta) / size,
            allowed=norm(slack + distance / 2) / size,
            delta=delta,
            moved=int((delta != 0).sum()),
            lost=int(((delta != 0) & (self.move == 0)).sum()),
        )

    def wrong_state(self) -> list[str]:
        """The entries of state that are not the page's after the step, in words."""
        found = []
        for key, new in self.page.state.items():
            if key in self.state_after and self.state_dtypes.get(key) in DTYPES:
                after, new = (np.asarray(x, "float64") for x in (self.state_after[key], new))
                spread = np.abs(np.asarray(self.rough.state[key], "float64") - new)
                distance = spacing(new, self.state_dtypes[key])
                slack = allowance(new, spread, self.arithmetic) + distance
                if not is_between(after, new, slack, distance, "nearest").all() and np.isfinite(new).all():
                    k = float((after * new).sum() / ((new * new).sum() or 1.0))
                    is_scaled = is_between(after, k * new, max(1.0, abs(k)) * slack, distance, "nearest").all()
                    stays = key in self.state and np.array_equal(after, self.state[key])
                    how = "does not change" if stays else f"is {k:.4g} times" if is_scaled else "is not"
                    found.append(f"its state {key!r} {how}{'' if stays else ' that of the page'}")
        return found

    def with_options(self, **options: Any) -> Step:
        """The same step by the rule with other options."""
        return replace(self, rule=replace(self.rule, **options))


@dataclass(frozen=True)
class Comparison:
    """A move beside a page: whether its dtypes allow the difference; both relative to the page's move."""

    fits: bool
    off: float
    allowed: float
    delta: Arr
    #: How many elements the page moves, and how many of them have not moved.
    moved: int
    lost: int


def norm(x: Arr) -> float:
    return float(np.sqrt(np.square(np.asarray(x, "float64")).sum()))


def allowance(values: Arr, spread: Arr, arithmetic: str) -> Arr:
    """How far each number may be off. spread: by how much it changes if what it is made of is off by UNITS."""
    largest = float(np.abs(values).max(initial=0.0))
    return spread + UNITS * max(DTYPES[arithmetic].rounding / 2 * largest, float(spread.mean()) if spread.size else 0.0)


def spacing(x: Arr, dtype: str) -> Arr:
    """The distance to the next number of a dtype."""
    return xp.spacing(np.asarray(x, "float64"), DTYPES[dtype].digits, DTYPES[dtype].least)


def is_between(x: Arr, aims: Arr, slack: Arr, distance: Arr, rounding: str) -> Arr:
    """Whether numbers are what these aims, each off by its slack at most, are rounded to."""
    low, high = aims - slack, aims + slack
    if rounding == "nearest":
        low, high = np.rint(low / distance) * distance, np.rint(high / distance) * distance
    else:  # either neighbour
        low, high = low - distance, high + distance
    inside: Arr = (low <= x) & (x <= high)
    return inside
