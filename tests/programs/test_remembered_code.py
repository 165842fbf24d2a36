"""What is traced, scheduled or emitted is remembered by the structure of a rule: schedules of numbers trace nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from thalweg.kernels.cpu import compiled
from thalweg.programs import budget, evaluate, host, parts, reasons, schedule
from thalweg.rules import RULES, Rule, WholeRule
from thalweg.rules.entries import Count
from thalweg.rules.options import number_options, options_of
from thalweg.settings import Handling, Setting

SHAPE = (12, 8)
VALUES = np.linspace(0.1, 0.9, 300).tolist()
#: Every option of a rule that is a number of the arithmetic.
NUMBERS = [(name, option) for name, rule in RULES.items() for option in sorted(number_options(rule))]


def kernels_for_gpus() -> Any:
    pytest.importorskip("triton")
    from thalweg.kernels.triton import derived_tiles, explained, loading, served

    return loading, derived_tiles, served, explained


def with_number(rule: Rule, option: str, value: float) -> Rule:
    """Of a pair, the first."""
    before = (value, 1.0) if options_of(type(rule))[option].is_range else getattr(rule, option)
    return replace(rule, **{option: (value, *before[1:]) if isinstance(before, tuple) else value})


def use(rule: Rule, beside: Callable[[Rule], Any] = lambda rule: None) -> None:
    """All that engines, explain() and plans ask about a rule."""
    setting = Setting(rule, Handling())
    schedule.needs_sums(rule, SHAPE) if not rule.needs_whole else None
    budget.bytes_moved(setting, SHAPE, "float32")
    reasons.reason_underived(rule, SHAPE)
    if isinstance(rule, WholeRule) and not parts.reason_unparted(rule, SHAPE):
        counts = dict.fromkeys(rule.keys(SHAPE, Count), 0.0)
        parts.decide_by(rule, parts.own_key(rule, SHAPE), counts, 1)
    elif not rule.needs_whole:
        compiled.reason_uncompiled(rule, SHAPE)
        compiled.source_of(setting, SHAPE, "float32")
        evaluate.order_for(rule, rule, list(rule.entries(SHAPE)), SHAPE, with_lr=True)
    beside(rule)


def misses(*functions: Any) -> list[int]:
    """How often each did its work."""
    return [function.cache_info().misses for function in functions]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_schedule_of_an_option_traces_once(name: str, option: str) -> None:
    worked = (
        schedule.example_needs_sums,
        budget.schedule_kind,
        reasons.reason_against_example,
        parts.trace_decision,
        parts.make_decision,
        compiled.emit_kind,
        compiled.compile_kind,
        compiled.reason_against_kind,
        evaluate.trace_order,
        host.function_from,
    )
    use(with_number(RULES[name](), option, 0.5))
    before = misses(*worked)
    for value in VALUES:
        use(with_number(RULES[name](), option, value))
    assert misses(*worked) == before


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_schedule_of_an_option_emits_kernels_for_gpus_once(name: str, option: str) -> None:
    loading, tiles, served, explained = kernels_for_gpus()
    worked = loading.traced, loading.kernels_for, tiles.kernels_for, served.scalars_of, served.cuts_groups

    def ask(rule: Rule) -> None:
        for handling in (Handling(), Handling(state_dtype="int8")):
            explained.source_of(Setting(rule, handling), SHAPE, "float32")

    use(with_number(RULES[name](), option, 0.5), ask)
    before = misses(*worked)
    for value in VALUES:
        use(with_number(RULES[name](), option, value), ask)
    assert misses(*worked) == before
