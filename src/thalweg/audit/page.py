"""One tensor around one step, and the same step by the page of a rule, in float64 and with what dtypes may cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules import Muon, Rule, Update
from thalweg.rules.entries import Count, Factor, Moment
from thalweg.rules.noise import normal, tensor_id
from thalweg.settings import ParameterOptions
from thalweg.spaces import numpy as xp

Arr: TypeAlias = npt.NDArray[Any]

#: How far a step may be off, in units of the last place of its arithmetic: it is some ten operations for an element,
#: each off by half a unit, in either of two orders. The same for rules that multiply matrices: sums of dozens of
#: products.
UNITS, UNITS_OF_PRODUCTS = 16, 1024
#: Units by which each step of a Newton-Schulz iteration is off: half a unit of its 16 bits for each of three products.
UNITS_OF_ITERATIONS = 1.5
#: What is off at random may happen to be off by less than this part of it at an element.
SHARE = 1 / 4
#: How often a page is run on numbers that are off, to see where it jumps, for tensors of so many elements and others.
RUNS, SMALL = 8, 4096


#: What multiplies the gradients of a step that is to be left out.
SKIPPED = 0.0


class Comparison(NamedTuple):
    """A move beside a page: whether its dtypes allow the difference; how far it is off, and may be, as parts of it."""

    fits: bool
    off: float
    allowed: float
    delta: Arr
    #: How many elements the page moves, and how many of them have not moved.
    moved: int
    lost: int


@dataclass(frozen=True)
class Step:
    """What a step was given for one tensor, and what it made of it: arrays of the host."""

    name: str
    rule: Rule
    before: Arr
    gradient: Arr
    after: Arr
    #: State by the names of the page; empty: there is none yet.
    state: Mapping[str, Arr]
    #: The number of the step from 1, the learning rate, and what multiplies the step size and the gradient.
    t: int
    lr: float | None
    lr_scale: float = 1.0
    grad_scale: float = 1.0
    #: The group of the tensor, its dtype, and that of the arithmetic.
    group: int = 0
    dtype: str = "float32"
    arithmetic: str = "float32"
    rounding: str = "nearest"
    #: Of random numbers the seed, and the name for which they are drawn, if that is another.
    seed: int = 0
    drawn_by: str = ""
    #: How often the tensor is written in a step, each time rounded to the nearest.
    writes: int = 1
    #: Whether 1 - beta**t is computed in the same arithmetic, with as many digits less as beta is close to 1.
    is_coarse: bool = False
    state_after: Mapping[str, Arr] = field(default_factory=dict)
    state_dtypes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def by(cls, setting: ParameterOptions, t: int, dtype: str, scale: float, **known: Any) -> Step:
        """A step by what holds for a parameter of this dtype. scale: of its gradient."""
        handling = setting.handling
        rounding, sign = handling.rounding if dtype in NARROW else "nearest", -1.0 if handling.maximize else 1.0
        chosen: dict[str, Any] = dict(rule=setting.rule_at(t), rounding=rounding, seed=handling.seed)
        return cls(t=t, dtype=dtype, grad_scale=sign * scale, **chosen, **known)

    @property
    def rate(self) -> float:
        return (1.0 if self.lr is None else self.lr) * self.lr_scale

    def run(self, seed: int | None = None) -> Update:
        """The answer of the page; with a seed in the step's precision, and but for 0 of numbers that are off."""
        wide = "float64" if seed is None or self.arithmetic == "float64" else "float32"
        counts, rng = self.rule.keys(self.before.shape, Count), np.random.default_rng(seed or 0)

        def given(x: Arr, key: str = "") -> Arr:
            off = 1 + self.offset * rng.choice([-1, 1], np.shape(x)) if seed and key not in counts else 1.0
            return np.asarray(np.asarray(x, "float64") * off, wide)

        p, g = given(self.before), given(self.gradient) * self.grad_scale
        state = {key: given(entry, key) for key, entry in self.state.items()} or self.rule.init(xp, p)
        numbers: dict[str, Any] = dict(t=self.t, lr=self.lr, lr_scale=self.lr_scale)
        place = dict(seed=self.seed, tensor=tensor_id(self.drawn_by or self.name), t=self.t)
        with np.errstate(all="ignore"):
            return self.rule.update(xp, g, state, p, **numbers, noise=lambda: normal(xp, p, **place))

    @property
    def precision(self) -> float:
        """How far a number of a step may be off, as a part of it."""
        units = UNITS_OF_PRODUCTS if self.rule.needs_whole or self.is_coarse else UNITS
        return units * DTYPES[self.arithmetic].rounding / 2

    @property
    def offset(self) -> float:
        """By how much of themselves numbers are off where a page is run on such: as by one step of 16-bit products."""
        products = getattr(self.rule, "ns_dtype", None)
        return max(self.precision, UNITS_OF_ITERATIONS * DTYPES[products].rounding if products in NARROW else 0.0)

    @property
    def of_products(self) -> float:
        """How far a move may be off by products in 16 bits, as a part of its largest element."""
        products, steps = getattr(self.rule, "ns_dtype", None), getattr(self.rule, "ns_steps", 0)
        if products not in NARROW:
            return 0.0
        coefficients: Any = getattr(self.rule, "ns_coefficients", "")
        if not isinstance(coefficients, str) and coefficients != Muon().ns_coefficients:
            return 1.0  # which may enlarge any error
        return steps * UNITS_OF_ITERATIONS * DTYPES[products].rounding

    @cached_property
    def page(self) -> Update:
        return self.run()

    @cached_property
    def rough(self) -> list[Update]:
        seeds = range(0 if self.rule.needs_whole else 1, 1 + (RUNS if self.before.size <= SMALL else 1))
        return [self.run(seed) for seed in seeds]

    @cached_property
    def move(self) -> Arr:
        return np.asarray(wide(self.after) - wide(self.before))

    def compare(self, factor: float = 1.0, shrink: float = 0.0) -> Comparison:
        """The move beside that of the page, taken so many times, less a share of the tensor."""
        p, shape = wide(self.before), self.before.shape
        with np.errstate(all="ignore"):
            delta, *rough = (
                np.broadcast_to(factor * wide(update.delta) - shrink * p, shape) for update in (self.page, *self.rough)
            )
            spread = np.max([np.abs(each - delta) for each in rough], 0)
            distance = spacing(np.maximum(np.abs(p), np.abs(p + delta)), self.dtype)
            slack = distance * (self.writes - 1) / 2 + spacing(p + delta, "float64")  # in which this sum is rounded too
            if self.rounding == "compensated":  # 256ths of the distance, where 128 are told as 127
                slack = distance = distance * 2.0**-8
            if self.writes == 1:  # the sum is rounded before it is stored, as is what of the tensor is a part of delta
                slack = slack + spacing(p + delta, self.arithmetic)
            slack = slack + allowance(delta, spread, max(self.precision, self.of_products))
            jumps = int((spread > np.maximum(np.abs(delta), slack) / 2).sum())
            outside = ~is_between(wide(self.after), p + delta, slack, self.dtype, self.rounding)
        size = norm(delta) or norm(self.move) or 1.0
        return Comparison(
            fits=int(outside.sum()) <= jumps and bool(np.isfinite(delta).all()),
            off=norm(self.move - delta) / size,
            allowed=norm(slack + distance / 2) / size,
            delta=delta,
            moved=int((delta != 0).sum()),
            lost=int(((delta != 0) & (self.move == 0)).sum()),
        )

    def faults_of_state(self) -> list[str]:
        """The entries of state that are not the page's after the step, and those that rounding keeps as they are."""
        found, entries = [], self.rule.entries(self.before.shape)
        for key, after in self.state_after.items() if self.grad_scale != SKIPPED else ():
            dtype, new = self.state_dtypes[key], wide(self.page.state[key])
            if dtype not in DTYPES or isinstance(entries[key], Factor) or not np.isfinite(new).all():
                continue
            spread = np.max([np.abs(wide(update.state[key]) - new) for update in self.rough], 0)
            products = 0.0 if isinstance(entries[key], Moment) else 2 * self.of_products  # of squares twice as much
            slack = allowance(new, spread, max(self.precision, products)) + spacing(new, dtype)
            before = wide(self.state.get(key, 0.0))
            stays, moves = int(((after == before) & (new != before)).sum()), int((new != before).sum())
            if is_between(wide(after), new, slack, dtype).all():
                if 2 * stays > moves and dtype != "float64":
                    found.append(f"its state {key!r} is lost in rounding to {dtype}: {stays} of {moves} elements stay")
                continue
            k = float((after * new).sum() / ((new * new).sum() or 1.0))
            is_scaled = is_between(wide(after), k * new, max(1.0, abs(k)) * slack, dtype).all()
            how = "does not change" if stays == moves else f"is {k:.4g} times" if is_scaled else "is not"
            found.append(f"its state {key!r} {how}{'' if stays == moves else ' that of the page'}")
        return found

    def with_options(self, **options: Any) -> Step:
        """The same step by the rule with other options."""
        return replace(self, rule=replace(self.rule, **options))


def wide(x: Any) -> Arr:
    return np.asarray(x, "float64")


def norm(x: Any) -> float:
    return float(np.sqrt(np.square(wide(x)).sum()))


def allowance(values: Arr, spread: Arr, precision: float) -> Arr:
    """How far each number may be off. spread: by how much it changes if what it is made of is off by so much."""
    return np.asarray(spread + precision * np.abs(values).max(initial=0.0) + spread.mean() / SHARE)


def spacing(x: Arr, dtype: str) -> Arr:
    """The distance to the next number of a dtype."""
    return xp.spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)


def is_between(x: Arr, aims: Arr, slack: Arr, dtype: str, rounding: str = "nearest") -> Arr:
    """Whether numbers are what these aims, each off by its slack at most, are rounded to in a dtype."""
    low, high = aims - slack, aims + slack
    if rounding == "nearest":
        low, high = (np.rint(end / spacing(end, dtype)) * spacing(end, dtype) for end in (low, high))
    elif rounding == "stochastic":  # either neighbour
        low, high = low - spacing(low, dtype), high + spacing(high, dtype)
    return np.asarray((low <= x) & (x <= high))
