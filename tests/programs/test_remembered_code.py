"""A schedule of an option traces nothing: once its code is made, the rule is not asked again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg.numpy
from thalweg.kernels.cpu.library import is_here
from thalweg.rules import RULES
from thalweg.rules.options import number_options, options_of

#: Every option that is a number of the arithmetic, of the rules that native code steps by itself.
NUMBERS = [
    (name, option) for name, rule in RULES.items() if not rule.needs_whole for option in sorted(number_options(rule))
]


@pytest.mark.skipif(not is_here(), reason="there is no native core here")
@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_a_schedule_of_an_option_traces_once(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, asked = RULES[name], list[Any]()
    update, usual = rule.update, getattr(rule(), option)

    def at(t: int) -> Any:
        value = 0.1 + 0.001 * t
        if options_of(rule)[option].is_range:
            return value, 1.0
        return (value, *usual[1:]) if isinstance(usual, tuple) else value

    beside = {need.option: 0.5 for need in [options_of(rule)[option].need] if need and need.option == "momentum"}
    optimizer = thalweg.numpy.optimizer(rule)(0.1, engine="fused", **beside, **{option: at})
    params, grads = {"w": np.ones((12, 8))}, {"w": np.ones((12, 8))}
    monkeypatch.setattr(rule, "update", lambda *args, **given: asked.append(1) or update(*args, **given))
    optimizer.step(params, grads)
    before = len(asked)
    for _ in range(20):
        optimizer.step(params, grads)
    assert len(asked) == before
