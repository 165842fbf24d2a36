"""One tensor around one step, and the step of its page: in float64, and in arithmetic as inexact as its engine's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.boundary import seen
from thalweg.dtypes import DTYPES, NARROW
from thalweg.rules import Rule
from thalweg.rules.entries import Count
from thalweg.rules.noise import normal
from thalweg.settings import ParameterOptions
from thalweg.spaces import numpy as xp
from thalweg.storage import arithmetic, decoded

Arr: TypeAlias = npt.NDArray[Any]
#: A parameter and its state on the host, by the names of the page; the parameter itself is at "".
Arrays: TypeAlias = Mapping[str, Arr]

#: Terms of a sum that are added one after the other, as parts of all: libraries add in four lanes or more, where
#: partial sums are half of the whole; each may be rounded to the same side.
LANES, MOST = 1 / 8, 1 / 2
#: How often a page is run in inexact arithmetic, for tensors of at most so many elements, and for others.
RUNS, RUNS_OF_LARGE, SMALL = 8, 2, 2**16
#: An engine may be off by so many times as much as these runs: one number in nine exceeds the largest of eight others.
TIMES = 3
#: By which part of the distance to its neighbour a way of rounding moves a number.
ROUNDED = {"nearest": 1 / 2, "stochastic": 1.0, "compensated": 2.0**-8}
#: By how many units 1 - beta**t is off where it is computed as it is written, with beta up to 0.999.
COARSE = 1024


class Precision(NamedTuple):
    """How exactly an engine computes."""

    #: The dtype of its operations, and the one in which sums add up.
    dtype: str
    sums: str = "float64"
    #: By how much of themselves the factors of products of matrices are off, and 1 - beta**t.
    products: float = 0.0
    powers: float = COARSE * DTYPES["float64"].rounding


@dataclass(frozen=True)
class Step:
    """What a step was given for one tensor, and what it made of it."""

    name: str
    #: What holds for it at this step, whose number counts from 1; and the learning rate.
    setting: ParameterOptions
    t: int
    lr: float | None
    #: What multiplies the gradient: 0 if the step is to be left out.
    scale: float
    gradient: Arr
    #: Its state may lack what the page begins with.
    before: Arrays
    after: Arrays
    #: In which they are kept.
    dtypes: Mapping[str, str]
    precision: Precision
    #: For which random numbers are drawn.
    tensor: int
    #: The class of its optimizer, and the index of its group.
    kind: str = ""
    group: int = 0

    @property
    def rule(self) -> Rule:
        return self.setting.rule

    @property
    def rate(self) -> float:
        return (1.0 if self.lr is None else self.lr) * self.setting.lr_scale

    @property
    def decay(self) -> float:
        return float(getattr(self.rule, "weight_decay", 0.0))

    @cached_property
    def given(self) -> Arrays:
        """What the page is given."""
        return {**self.rule.init(xp, wide(self.before[""])), **self.before}

    def replay(self, seed: int | None = None) -> Arrays:
        """What the page makes of it; with a seed in inexact arithmetic."""
        if not self.scale:
            return self.given
        dtype = "float64" if seed is None or self.precision.dtype == "float64" else "float32"
        made: Callable[[Any], Any] = np.asarray if seed is None else inexact(self.precision, seed)
        counts, numerics = self.rule.keys(self.gradient.shape, Count), self.setting.numerics
        state = {key: np.asarray(x, dtype) for key, x in self.given.items()}
        state = {key: x if key in counts else made(x) for key, x in state.items()}
        p, g = state.pop(""), made(np.asarray(self.gradient, dtype))
        t = self.t * (1 - self.precision.powers * (seed is not None))  # less: the first step is never after the first
        numbers: dict[str, Any] = dict(t=t, lr=self.lr, lr_scale=self.setting.lr_scale)
        drawn = dict(seed=numerics.seed, tensor=self.tensor, t=self.t)
        with np.errstate(all="ignore"):
            g = g * (-self.scale if numerics.maximize else self.scale)
            update = self.rule.update(xp, g, state, p, **numbers, noise=lambda: normal(xp, np.asarray(p), **drawn))
            return {key: wide(x) for key, x in update.state.items()} | {"": wide(p) + wide(update.delta)}

    @cached_property
    def page(self) -> Arrays:
        return self.replay()

    @cached_property
    def inexact_pages(self) -> list[Arrays]:
        return [self.replay(seed) for seed in range(RUNS if self.gradient.size <= SMALL else RUNS_OF_LARGE)]

    def moves(self, key: str = "") -> tuple[Arr, Arr]:
        """How the parameter, or an entry of its state, has moved, and how the page moves it."""
        before = wide(self.given[key])
        return wide(self.after[key]) - before, self.page[key] - before

    def compare(self, key: str = "", factor: float = 1.0) -> tuple[bool, float, float]:
        """Whether a move may be the page's, so many times; by which part of that it is off, and by which it may be."""
        before, dtype, (move, way) = wide(self.given[key]), self.dtypes[key], self.moves(key)
        numerics = self.setting.numerics
        rounding = (numerics.state_rounding if key else numerics.rounding) if dtype in NARROW else "nearest"
        finer = max(dtype, self.precision.dtype, key=lambda name: DTYPES[name].digits)
        with np.errstate(all="ignore"):
            aim, off = before + factor * way, move - factor * way
            spread = abs(factor) * np.max([np.abs(other[key] - self.page[key]) for other in self.inexact_pages], 0)
            allowed = TIMES * (spread + spread.mean()) + spacing(aim, finer)  # as it was off, and as is usual
            distance = spacing(np.maximum(np.abs(before), np.abs(aim)), dtype)
            allowed += ROUNDED[rounding] * distance
        size = norm(factor * way) or norm(move) or 1.0
        fits = bool((np.abs(off) <= allowed).all() and np.isfinite(way).all())
        return fits, norm(off) / size, norm(allowed) / size


def inexact(precision: Precision, seed: int) -> Callable[[Any], Any]:
    """Makes arrays whose operations are all off at random: by a unit in the last place of a dtype, and more in sums.

    Products of matrices add up in float32 at least.
    """
    rng, unit = np.random.default_rng(seed), DTYPES[precision.dtype].rounding
    summed, product = LANES * DTYPES[precision.sums].rounding, min(unit, DTYPES["float32"].rounding)

    def off(x: Any, share: float) -> Any:
        return x * (1 - share + 2 * share * rng.random(x.shape, x.dtype)) if x.dtype.kind == "f" else x

    class Inexact(np.ndarray):
        def __array_ufunc__(self, ufunc: Any, method: str, *given: Any, **named: Any) -> Any:
            inputs = [x.view(np.ndarray) if isinstance(x, np.ndarray) else x for x in given]
            if ufunc is np.rint:  # to either neighbour: engines round in other places
                inputs = [inputs[0] + rng.random(inputs[0].shape) - 0.5]
            if ufunc is np.matmul:
                inputs = [off(x, precision.products + product * x.shape[-1] ** 0.5) for x in inputs]
            result = getattr(ufunc, method)(*inputs, **named)
            if isinstance(result, tuple):
                return result
            terms = inputs[0].size / max(1, result.size) if ufunc is np.add and method == "reduce" else 0
            return np.asarray(off(np.asarray(result), min(MOST, unit + terms * summed))).view(Inexact)

    return lambda x: np.asarray(x).view(Inexact)


def read(space: Any, rule: Rule, p: Any, entries: dict[str, Any]) -> tuple[Arrays, Mapping[str, str]]:
    """A parameter, at "", and its state as the page sees them, copied; and the dtypes in which they are kept.

    space: that of both, which are on the host.
    """
    numbers = {**decoded(space, rule, p, entries), "": seen(space, p, entries)}
    dtypes = {key: space.dtype(x) for key, x in {**entries, "": p}.items()}
    return {key: copy(space, x) for key, x in numbers.items()}, dtypes


def copy(space: Any, x: Any) -> Arr:
    """A copy of an array with all of its digits, also of 16 bits, which numpy lacks."""
    return np.asarray(space.astype(x, arithmetic(space.dtype(x)))).copy()


def wide(x: Any) -> Arr:
    return np.asarray(x, "float64")


def norm(x: Any) -> float:
    return float(np.linalg.norm(wide(x)))


def spacing(x: Arr, dtype: str) -> Arr:
    """The distance to the next number of a dtype."""
    return xp.spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)
