"""How much memory the temporaries of a step take: when each is computed, and when it is let go.

A step of one parameter is run on arrays without numbers. Where several are stepped as a list, each operation is done
for all of them before the next, so what they hold is added up moment by moment.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from thalweg.arrays import Shape
from thalweg.boundary import Advance, advance
from thalweg.rules.entries import Count, PerSlice
from thalweg.rules.whole import WholeRule
from thalweg.settings import Setting
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import Ledger, Library, ShapeOnly
from thalweg.storage import arithmetic, kept

#: Any learning rate will do: no number is ever computed.
LR = 1e-3


@dataclass(frozen=True)
class Lifetimes:
    """Bytes of the temporaries of a step."""

    #: Alive after each allocation, beyond what was there before the step.
    moments: tuple[int, ...] = ()
    #: Of the result: the new parameter, and its new state.
    parameter: int = 0
    state: int = 0
    #: Of the inputs, where they are copies: they go with the step.
    inputs: int = 0

    @property
    def peak(self) -> int:
        return max(self.moments, default=0) + self.inputs

    @property
    def result(self) -> int:
        return self.parameter + self.state


@dataclass(frozen=True)
class Products:
    """Matrix products of one step."""

    flops: int
    #: Of operands and results.
    bytes: int


class OfWhole:
    """The space of shapes for a shard: the shape that a rule asks for is that of the whole parameter."""

    def __init__(self, whole: Shape) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(shapes, name)

    def shape(self, x: ShapeOnly) -> Shape:
        return self.whole


@functools.lru_cache(maxsize=4096)
def lifetimes(
    setting: Setting,
    shape: Shape,
    dtype: str,
    *,
    whole: Shape | None = None,
    library: Library = "torch",
    selects: bool = False,
    given_noise: bool = False,
    stack: int = 0,
) -> Lifetimes:
    """Those of a step of one parameter after its first step, with a refresh if it is Kron's.

    whole: the shape of the whole parameter, if this is a shard. selects: whether both sides of a branch are computed,
    because the host does not know which is asked for. given_noise: noise is made by native code, and not by the rule.
    stack: so many parameters of this shape are copied into one with a leading axis more.
    """
    rule, ledger = setting.rule_at(1), Ledger(library, selects=selects, widens=library == "torch")
    if stack:
        shape, rule = (stack, *shape), replace(rule, stacked_axes=rule.stacked_axes + 1)
    p, g = ledger.array(shape, dtype), ledger.array(shape, dtype)
    declared, held = rule.entries(whole or shape), kept(rule, setting.handling, whole or shape, dtype, shape)
    state = {key: ledger.array(*entry) for key, entry in held.items()}
    ledger.begin()
    noise = (lambda: ledger.array(shape, arithmetic(dtype)).view(shape)) if given_noise else None
    result = stepped(shapes if whole is None else OfWhole(whole), rule, setting, p, g, state, noise=noise)
    left, new = ledger.live - ledger.start, result.p.nbytes
    copied = p.nbytes + g.nbytes + sum(e.nbytes for key, e in state.items() if not isinstance(declared.get(key), Count))
    return Lifetimes(tuple(moment - ledger.start for moment in ledger.moments), new, left - new, copied if stack else 0)


def listed(several: Iterable[Lifetimes]) -> Lifetimes:
    """Those of a list of parameters that are stepped together; all go through the same operations."""
    found = list(several)
    length = max((len(each.moments) for each in found), default=0)
    # one that needs fewer operations keeps its result while the others go on
    padded = [each.moments + (each.result,) * (length - len(each.moments)) for each in found]
    return Lifetimes(
        tuple(map(sum, zip(*padded, strict=True))),
        sum(each.parameter for each in found),
        sum(each.state for each in found),
    )


def in_turn(steps: Iterable[Lifetimes], *, committed: bool = False, together: bool = False) -> int:
    """Bytes at the peak of steps one after the other: while one is computed, the result before it is still there.

    committed: its state has taken the place of the old one by then, but for that of a stack, which is copied.
    together: nothing is written before all are computed.
    """
    peak = before = 0
    for each in steps:
        peak = max(peak, before + each.peak)
        if together:
            before += each.result
        else:
            before = each.parameter if committed and not each.inputs else each.result
    return peak


@functools.lru_cache(maxsize=4096)
def products_of(setting: Setting, shape: Shape, dtype: str, refresh: bool) -> Products:
    """The matrix products of a step of one parameter; ``refresh``: of one that refreshes Kron's factors."""
    rule, ledger = setting.rule_at(1), Ledger(branch=refresh)
    p, g = ledger.array(shape, dtype), ledger.array(shape, dtype)
    state = {key: ledger.array(*entry) for key, entry in kept(rule, setting.handling, shape, dtype).items()}
    stepped(shapes, rule, setting, p, g, state, noise=lambda: ledger.array(shape, arithmetic(dtype)))
    return Products(ledger.flops, ledger.product_bytes)


@functools.lru_cache(maxsize=4096)
def made_peak(rule: WholeRule, shape: Shape, precision: str, stack: int = 0, *, widens: bool = True) -> int:
    """The temporaries of the middle part of a rule, what is shown included, for one tensor, or for a stack of so many.

    precision: that of the arithmetic. widens: whether products of 16 bits are made in float32.
    """
    ledger = Ledger("torch", widens=widens)
    declared = rule.entries(shape)
    if stack:
        shape, rule = (stack, *shape), replace(rule, stacked_axes=rule.stacked_axes + 1)
    own = {key: entry for key, entry in declared.items() if isinstance(entry, PerSlice)}
    state = {key: ledger.array(entry.shape(shape, rule.stacked_axes), precision) for key, entry in own.items()}
    ledger.begin()
    shown = tuple(ledger.array(shape, rule.whole_dtype(precision)) for _ in range(rule.whole_tensors()))
    rule.transform(shapes, shown, state, noise=lambda: ledger.array(shape, precision))
    return ledger.extra


def stepped(space: Any, rule: Any, setting: Setting, p: Any, g: Any, state: Any, *, noise: Any = None) -> Advance:
    """A step with whatever numbers; joint clipping scales gradients if it is asked for."""
    return advance(
        space,
        rule,
        setting.handling,
        p,
        g,
        state,
        t=1,
        lr=LR,
        lr_scale=1.0,
        tensor=0,
        grad_scale=None if setting.handling.max_grad_norm is None else 1.0,
        noise=noise,
    )
