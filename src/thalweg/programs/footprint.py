"""What a step of one parameter takes: memory, products and sums, found by running the rule once over shapes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from thalweg.arrays import Shape
from thalweg.boundary import advance
from thalweg.rules import Direction, Update
from thalweg.rules.entries import PerSlice
from thalweg.rules.whole import WholeRule
from thalweg.settings import Setting
from thalweg.spaces import shapes
from thalweg.spaces.shapes import Library, Meter, Reduction
from thalweg.storage import arithmetic, describe_state

#: Any learning rate will do: no number is ever computed.
LR = 1e-3


@dataclass(frozen=True)
class Footprint:
    """Of one step, in bytes where nothing else is said."""

    #: Temporaries that are alive together, at most, with new values.
    peak: int
    #: The new parameter, and its new state.
    parameter: int
    state: int
    #: Alive while owners of whole tensors do their part.
    waiting: int
    #: Floating point operations of matrix products, and bytes of their operands and results.
    flops: int
    product_bytes: int
    #: Sums and maxima, together where they are asked for together; with owners, those before they do their part.
    reductions: tuple[tuple[Reduction, ...], ...]

    @property
    def result(self) -> int:
        return self.parameter + self.state


class OfWhole:
    """The space of shapes for a shard: the shape that a rule asks for is that of the whole parameter."""

    def __init__(self, whole: Shape) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> Any:
        return getattr(shapes, name)

    def shape(self, x: Any) -> Shape:
        return self.whole


class ByOwners:
    """A rule that needs whole tensors, without its middle part: what owners make comes back in the right shapes."""

    def __init__(self, rule: WholeRule, meter: Meter) -> None:
        self.rule, self.meter, self.waiting = rule, meter, 0
        self.reductions: list[list[Reduction]] = []
        self.entries, self.stacked_axes = rule.entries, rule.stacked_axes

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any, noise: Any) -> Update:
        before = len(self.meter.reductions)
        tensors, state, due = self.rule.prepare(xp, g, s, p, t)
        self.waiting, self.reductions = self.meter.live - self.meter.start, self.meter.reductions[before:]
        x = tensors[0]
        del tensors
        learned = self.rule.keys(xp.shape(p), PerSlice)
        made = Direction(
            xp.zeros_like(x),
            {key: xp.full((), 0.0, x) for key in self.rule.FIGURES},
            {key: xp.zeros_like(entry) for key, entry in s.items() if key in learned},
        )
        return self.rule.apply(xp, made, s, p, {**state, **made.state}, due=due, lr=lr * lr_scale)


@functools.lru_cache(maxsize=4096)
def footprint(
    setting: Setting,
    shape: Shape,
    dtype: str,
    *,
    whole: Shape | None = None,
    library: Library = "torch",
    refresh: bool = True,
    selects: bool = False,
    given_noise: bool = False,
    by_owners: bool = False,
) -> Footprint:
    """Of a step after the first; ``refresh``: of one that refreshes Kron's factors.

    whole: the shape of the whole parameter, if this is a shard. selects: whether both sides of a branch are computed,
    because the host does not know which is asked for. given_noise: noise is made by native code, and not by the rule.
    """
    meter = Meter(library, selects=selects, branch=refresh, widens=library == "torch")
    rule: Any = setting.rule_at(1)
    p, g = meter.array(shape, dtype), meter.array(shape, dtype)
    entries = describe_state(rule, setting.handling, whole or shape, dtype, shape)
    state = {key: meter.array(*entry) for key, entry in entries.items()}
    meter.begin()
    if by_owners:
        rule = ByOwners(rule, meter)
    result = advance(
        shapes if whole is None else OfWhole(whole),
        rule,
        setting.handling,
        p,
        g,
        state,
        t=1,
        lr=LR,
        lr_scale=1.0,
        tensor=0,
        grad_scale=1.0 if setting.handling.needs_norm else None,
        noise=(lambda: meter.array(shape, arithmetic(dtype)).view(shape)) if given_noise else None,
    )
    left, new = meter.live - meter.start, result.p.nbytes
    return Footprint(
        peak=meter.extra,
        parameter=new,
        state=left - new,
        waiting=rule.waiting if by_owners else 0,
        flops=meter.flops,
        product_bytes=meter.product_bytes,
        reductions=tuple(map(tuple, rule.reductions if by_owners else meter.reductions)),
    )


@functools.lru_cache(maxsize=4096)
def middle_peak(rule: WholeRule, shape: Shape, precision: str, *, widens: bool = True) -> int:
    """The temporaries of the middle part of a rule, what is shown included, for one tensor: a stack needs as many more.

    precision: that of the arithmetic. widens: whether products of 16 bits are made in float32.
    """
    meter, declared = Meter(widens=widens), rule.entries(shape)
    own = {key: entry for key, entry in declared.items() if isinstance(entry, PerSlice)}
    state = {key: meter.array(entry.shape(shape, rule.stacked_axes), precision) for key, entry in own.items()}
    meter.begin()
    shown = tuple(meter.array(shape, rule.whole_dtype(precision)) for _ in range(rule.whole_tensors()))
    rule.transform(shapes, shown, state, noise=lambda: meter.array(shape, precision))
    return meter.extra
