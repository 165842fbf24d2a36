"""Of which rules kernels can be made; told without loading Triton."""

from __future__ import annotations

import functools

from thalweg.arrays import Shape
from thalweg.errors import RuleError
from thalweg.programs.extents import is_spread, kinds_of, reason_unseen, spread_shapes
from thalweg.programs.trace import example_of, trace
from thalweg.rules import Rule
from thalweg.rules.rule import stand_in

#: State entries that the tables of kernels have room for.
ROOM = 6


def reason_underived(rule: Rule, shape: Shape) -> str:
    """Why no kernels can be made of a rule for parameters of this kind, "" if they can."""
    return reason_against_example(stand_in(rule), example_of(rule, shape))


@functools.lru_cache(maxsize=256)
def reason_against_example(rule: Rule, shape: Shape) -> str:
    name, entries = type(rule).__name__, rule.entries(shape)
    if len(entries) > ROOM:
        return f"{name} keeps {len(entries)} entries for a parameter, and fused kernels have room for {ROOM}"
    if not all(map(is_spread, entries.values())):
        return f"{name} keeps entries of a shape of their own, for which no kernels are made"
    try:
        programs = [trace(rule, shape, spread_shapes(entries, shape), lr=lr) for lr in rates_of(rule)]
    except RuleError as error:
        return str(error)
    return next(filter(None, (reason_unseen(each, kinds_of(each, rule.stacked_axes)) for each in programs)), "")


def rates_of(rule: Rule) -> tuple[float | None, ...]:
    """An lr for each graph that a rule may have: without one, where it may choose its step size, and with one."""
    return (1.0, None) if rule.lr_optional else (1.0,)
