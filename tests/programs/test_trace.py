"""Rules of which no code can be made are told what to change. tests/test_own_rule_mistakes.py has more mistakes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from programs import program_of

from thalweg.errors import RuleError
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Moment


@dataclass(frozen=True, kw_only=True)
class Mistaken(Rule):
    """A rule with one entry, whose update each test writes."""

    over: ClassVar[tuple[int, ...]] = ()

    def entries(self, shape: Any) -> Any:
        return {"average": Moment(over=self.over)}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Any:
        return self.written(xp, g, s["average"], lr)


def answer(delta: Any, average: Any, **stats: Any) -> Update:
    return Update(delta, {"average": average}, True, stats)


def add_in_place(xp: Any, g: Any, m: Any, lr: Any) -> Any:
    m += g
    return answer(g, m)


def sum_of_sum(xp: Any, g: Any, m: Any, lr: Any) -> Any:
    (total,) = xp.sums((g, None))
    return answer(g * xp.sums((total, None))[0], m)


#: Under what is told: an update of which no code can be made.
MISTAKES: dict[str, Any] = {
    "line [0-9]+ of .*test_trace.py: update branches on a value that is known only when it runs: use xp.where": (
        lambda xp, g, m, lr: answer(g, m and g)
    ),
    "turns a value into a Python number": lambda xp, g, m, lr: answer(g * float(lr), m),
    "calls a function of numpy": lambda xp, g, m, lr: answer(np.sqrt(g) * np.ones(3), m),
    r"changes a value in place, .*: write x = x \+ y": add_in_place,
    "takes a part of a value": lambda xp, g, m, lr: answer(g, m[0]),
    "uses xp.upper, of which no fused code can be made": lambda xp, g, m, lr: answer(xp.upper(g), m),
    "sums what is one number along these axes already": sum_of_sum,
    r"must return the state that entries\(\) declares, \['average'\], got \['averages'\]": (
        lambda xp, g, m, lr: Update(g, {"averages": m}, True, {})
    ),
    r"must return a thalweg.Update\(delta, state\), got a tuple": lambda xp, g, m, lr: (g, m),
    "direction must be one number for each tensor": lambda xp, g, m, lr: answer(g, m, direction=g),
}


@pytest.mark.parametrize("told", MISTAKES)
def test_what_cannot_be_traced_is_told(told: str) -> None:
    mistaken = type("Mistaken", (Mistaken,), {"written": staticmethod(MISTAKES[told])})
    with pytest.raises(RuleError, match=f"^Mistaken.*{told}"):
        program_of(mistaken(), (6, 5))


def test_state_that_changes_its_shape_is_told() -> None:
    grown = type("Grown", (Mistaken,), {"over": (1,), "written": lambda self, xp, g, m, lr: answer(g, m + g)})
    with pytest.raises(RuleError, match="returns state 'average' of shape"):
        program_of(grown(), (6, 5))
