"""One tensor around one step, and the same step by its page: in float64, and in arithmetic as inexact as its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Count, Factor
from thalweg.rules.noise import normal, tensor_id
from thalweg.settings import ParameterOptions
from thalweg.spaces import numpy as xp

Arr: TypeAlias = npt.NDArray[Any]

#: Terms of a sum that are added one after the other, as parts of all: libraries add in four lanes or more, where
#: partial sums are half of the whole; each may be rounded to the same side.
LANES, MOST = 1 / 8, 1 / 2
#: Units by which 1 - beta**t is off where it is computed as it is written, with beta up to 0.999.
COARSE = 1024
#: The rounding of TF32, in which GPUs multiply matrices where a rule lets them.
TF32 = 2.0**-10
#: How often a page is run in inexact arithmetic, for tensors of at most so many elements, and for others.
RUNS, RUNS_OF_LARGE, SMALL = 8, 2, 2**16
#: An engine may be off by so many times as much as these runs: one number in nine exceeds the largest of eight others.
TIMES = 3
#: What multiplies the gradients of a step that is to be left out.
SKIPPED = 0.0


def inexact(dtype: str, sums: str, cut: float, seed: int) -> Callable[[Any], Arr]:
    """Makes arrays whose operations are all off at random: by a unit in the last place of a dtype, and more in sums.

    sums: the dtype in which they add up. Products of matrices do so in float32 at least. cut: by how much of themselves
    the numbers are off that are multiplied in them.
    """
    rng, unit, summed = np.random.default_rng(seed), DTYPES[dtype].rounding, LANES * DTYPES[sums].rounding
    product = min(unit, DTYPES["float32"].rounding)

    def off(x: Any, share: float) -> Any:
        if x.dtype.kind != "f":
            return x
        factor: Any = rng.random(x.shape, x.dtype)
        factor *= 2 * share
        factor += 1 - share
        factor *= x
        return np.asarray(factor, x.dtype)

    class Inexact(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
            inputs = [x.view(np.ndarray) if isinstance(x, np.ndarray) else x for x in given]
            if ufunc is np.rint:  # to either neighbour: engines round in other places
                inputs = [inputs[0] + rng.random(inputs[0].shape) - 0.5]
            if ufunc is np.matmul:
                inputs = [off(x, cut + product * x.shape[-1] ** 0.5) for x in inputs]
            result = getattr(ufunc, method)(*inputs, **named)
            if isinstance(result, tuple):
                return result
            terms = inputs[0].size / max(1, result.size) if ufunc is np.add and method == "reduce" else 0
            return off(np.asarray(result), min(MOST, unit + terms * summed)).view(Inexact)

    return lambda x: np.asarray(x).view(Inexact)


class Comparison(NamedTuple):
    """A move beside a page: whether its dtypes allow the difference; how far it is off, and may be, as parts of it."""

    fits: bool
    off: float
    allowed: float


@dataclass(frozen=True)
class Step:
    """What a step was given for one tensor, and what it made of it: arrays of the host."""

    name: str
    #: What holds for it at this step.
    setting: ParameterOptions
    before: Arr
    gradient: Arr
    after: Arr
    #: State by the names of the page; empty: there is none yet.
    state: Mapping[str, Arr]
    #: The number of the step from 1, the learning rate, and what multiplies the gradient.
    t: int
    lr: float | None
    scale: float = 1.0
    #: The group of the tensor, its dtype, and that of the arithmetic.
    group: int = 0
    dtype: str = "float32"
    arithmetic: str = "float32"
    #: The dtype in which sums add up.
    sums: str = "float64"
    on_gpu: bool = False
    #: Of other libraries, which round a parameter several times: the dtype in which they compute 1 - beta**t.
    biases: str = ""
    #: The name for which random numbers are drawn.
    drawn_by: str = ""
    state_after: Mapping[str, Arr] = field(default_factory=dict)
    state_dtypes: Mapping[str, str] = field(default_factory=dict)

    @property
    def rule(self) -> Rule:
        return self.setting.rule

    @property
    def decay(self) -> float:
        return float(getattr(self.rule, "weight_decay", 0.0))

    @property
    def rate(self) -> float:
        return (1.0 if self.lr is None else self.lr) * self.setting.lr_scale

    @property
    def is_ours(self) -> bool:
        return not self.biases

    @property
    def rounding(self) -> str:
        return self.setting.handling.rounding if self.dtype in NARROW else "nearest"

    def with_options(self, **options: Any) -> Step:
        """The same step by the rule with other options."""
        return replace(self, setting=replace(self.setting, rule=replace(self.rule, **options)))

    def run(self, seed: int | None = None) -> Update:
        """The answer of the page; with a seed in inexact arithmetic."""
        dtype = "float64" if seed is None or self.arithmetic == "float64" else "float32"
        is_cut = self.on_gpu and dtype == "float32" and getattr(self.rule, "precond_precision", "") == "tf32"
        noisy = inexact(self.arithmetic, self.sums, TF32 if is_cut else 0.0, seed or 0)
        given: Callable[[Any], Arr] = np.asarray if seed is None else noisy
        handling, counts = self.setting.handling, self.rule.keys(self.before.shape, Count)
        p, g = np.asarray(self.before, dtype), given(np.asarray(self.gradient, dtype))
        kept = {key: np.asarray(entry, dtype) for key, entry in self.state.items()} or self.rule.init(xp, p)
        state = {key: entry if key in counts else given(entry) for key, entry in kept.items()}
        # less, so that the first step is never after the first
        coarse = COARSE * DTYPES[self.biases].rounding if self.biases and seed is not None else 0.0
        numbers: dict[str, Any] = dict(t=self.t * (1 - coarse), lr=self.lr, lr_scale=self.setting.lr_scale)
        drawn = dict(seed=handling.seed, tensor=tensor_id(self.drawn_by or self.name), t=self.t)
        with np.errstate(all="ignore"):
            g = g * (-self.scale if handling.maximize else self.scale)
            return self.rule.update(xp, g, state, given(p), **numbers, noise=lambda: normal(xp, p, **drawn))

    @cached_property
    def page(self) -> Update:
        return self.run()

    @cached_property
    def blurred(self) -> list[Update]:
        return [self.run(seed) for seed in range(RUNS if self.before.size <= SMALL else RUNS_OF_LARGE)]

    @cached_property
    def move(self) -> Arr:
        return np.asarray(wide(self.after) - wide(self.before))

    def compare(self, factor: float = 1.0) -> Comparison:
        """The move beside that of the page, taken so many times."""
        p = wide(self.before)
        with np.errstate(all="ignore"):
            deltas = (factor * wide(update.delta) for update in (self.page, *self.blurred))
            delta, *blurred = (np.broadcast_to(each, p.shape) for each in deltas)
            spread, slack = allowance(delta, blurred)
            distance = spacing(np.maximum(np.abs(p), np.abs(p + delta)), self.dtype)
            if self.rounding == "compensated":  # 256ths of the distance, where 128 are told as 127
                distance = distance * 2.0**-8
                slack = slack + distance
            slack = slack + spacing(p + delta, self.arithmetic if self.is_ours else self.dtype)
            jumps = int((spread > np.maximum(np.abs(delta), slack) / 2).sum())
            outside = ~is_between(wide(self.after), p + delta, slack, self.dtype, self.rounding)
        size = norm(delta) or norm(self.move) or 1.0
        return Comparison(
            fits=int(outside.sum()) <= jumps and bool(np.isfinite(delta).all()),
            off=norm(self.move - delta) / size,
            allowed=norm(slack + distance / 2) / size,
        )

    def faults_of_state(self) -> list[str]:
        """The entries of state that are not the page's after the step, and those that rounding keeps as they are."""
        faults, entries = [], self.rule.entries(self.before.shape)
        for key, after in self.state_after.items() if self.scale != SKIPPED else ():
            dtype, new = self.state_dtypes[key], wide(self.page.state[key])
            if dtype not in DTYPES or isinstance(entries[key], Factor) or not np.isfinite(new).all():
                continue
            slack = allowance(new, [wide(update.state[key]) for update in self.blurred])[1] + spacing(new, dtype)
            before = wide(self.state.get(key, 0.0))
            stays, moves = int(((after == before) & (new != before)).sum()), int((new != before).sum())
            k = float((after * new).sum() / ((new * new).sum() or 1.0))
            if is_between(wide(after), new, slack, dtype).all():
                is_lost = 2 * stays > moves and dtype != "float64"
                how = f"is lost in rounding to {dtype}: {stays} of {moves} elements stay" if is_lost else ""
            else:
                is_scaled = is_between(wide(after), k * new, max(1.0, abs(k)) * slack, dtype).all()
                how = f"is {f'{k:.4g} times' if is_scaled else 'not'} that of the page"
            faults += [f"its state {key!r} {how}"] if how else []
        return faults


def wide(x: Any) -> Arr:
    return np.asarray(x, "float64")


def norm(x: Any) -> float:
    return float(np.sqrt(np.square(wide(x)).sum()))


def allowance(values: Arr, blurred: list[Arr]) -> tuple[Arr, Arr]:
    """How far numbers were apart in inexact arithmetic, and how far each may be: so far, and as far as is usual."""
    spread = np.max([np.abs(each - values) for each in blurred], 0)
    return spread, TIMES * (spread + spread.mean())


def spacing(x: Arr, dtype: str) -> Arr:
    """The distance to the next number of a dtype."""
    return xp.spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)


def is_between(x: Arr, aims: Arr, slack: Arr, dtype: str, rounding: str = "nearest") -> Arr:
    """Whether numbers are what these aims, each off by its slack at most, are rounded to in a dtype."""
    low, high = aims - slack, aims + slack
    below, above = spacing(low, dtype), spacing(high, dtype)
    if rounding == "nearest":
        low, high = np.rint(low / below) * below, np.rint(high / above) * above
    elif rounding == "stochastic":  # either neighbour
        low, high = low - below, high + above
    return np.asarray((low <= x) & (x <= high))
