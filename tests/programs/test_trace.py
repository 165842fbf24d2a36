"""A traced rule is the rule: its program, taken pass by pass, computes the same numbers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cases import FUSED_OPTIONS
from programs import program_of, run_program

from thalweg.errors import RuleError
from thalweg.rules import Rule, Update
from thalweg.rules.entries import Moment
from thalweg.settings import Settings
from thalweg.spaces import numpy as xp

SHAPES = {"number": (), "vector": (7,), "matrix": (6, 5), "conv": (4, 3, 2, 2)}


def arrays(rule: Rule, shape: tuple[int, ...], seed: int = 0) -> tuple[Any, Any, dict[str, Any]]:
    random = np.random.default_rng(seed)
    p, g = (np.asarray(random.standard_normal(shape)) for _ in range(2))
    state = {key: np.asarray(random.random(entry.shape)) for key, entry in rule.init(xp, p).items()}
    return p, g, state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("case", "options"), FUSED_OPTIONS)
def test_a_program_computes_what_its_rule_does(case: Any, options: dict[str, Any], shape: str) -> None:
    given = {key: value for key, value in options.items() if key not in ("variant", "lr")}
    lr = options.get("lr", 0.1)
    rule = Settings(case.rule, given, options.get("variant")).base.rule_at(3)
    if rule.stacked_axes > len(SHAPES[shape]):
        pytest.skip("fewer axes than are stacked")
    p, g, state = arrays(rule, SHAPES[shape])
    wanted = rule.update(xp, g, state, p, t=3, lr=lr, lr_scale=0.5)
    program = program_of(rule, SHAPES[shape], lr)
    for exact, guarded in ((state, False), ((), True)):
        found = run_program(program, rule, p, g, state, exact=exact, guarded=guarded, t=3, lr=lr, lr_scale=0.5)
        assert list(found.state) == list(wanted.state)
        assert list(found.stats) == list(wanted.stats)
        assert found.finite == wanted.finite
        np.testing.assert_allclose(found.p, p + wanted.delta, rtol=1e-14, atol=0)
        for key, value in {**wanted.state, **wanted.stats}.items():
            np.testing.assert_allclose({**found.state, **found.stats}[key], value, rtol=1e-14, atol=0, err_msg=key)


# ---- rules that no code can be made of


@dataclass(frozen=True, kw_only=True)
class Toy(Rule):
    """A rule with one entry, whose update each test writes."""

    def entries(self, shape: Any) -> Any:
        return {"average": Moment()}

    def update(self, xp: Any, g: Any, s: Any, p: Any, *, lr: Any, **rest: Any) -> Any:
        return self.written(xp, g, s["average"], lr)

    def written(self, xp: Any, g: Any, m: Any, lr: Any) -> Any:
        raise NotImplementedError


def answer(delta: Any, average: Any, **stats: Any) -> Update:
    return Update(delta, {"average": average}, True, stats)


class Branches(Toy):
    def written(self, xp: Any, g: Any, m: Any, lr: Any) -> Any:
        if g > 0:  # the line that is named
            g = -g
        return answer(g, m)


def add_in_place(xp: Any, g: Any, m: Any, lr: Any) -> Any:
    m += g
    return answer(g, m)


def sum_of_sum(xp: Any, g: Any, m: Any, lr: Any) -> Any:
    (total,) = xp.sums((g, None))
    return answer(g * xp.sums((total, None))[0], m)


#: Under what is told: an update of which no code can be made.
MISTAKES: dict[str, Any] = {
    "branches on a value": lambda xp, g, m, lr: answer(g, m and g),
    "turns a value into a Python number": lambda xp, g, m, lr: answer(g * float(lr), m),
    "calls a function of numpy": lambda xp, g, m, lr: answer(np.sqrt(g), m),
    "calls a function of nump[y]": lambda xp, g, m, lr: answer(g * np.ones(3), m),
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
    mistaken = type("Mistaken", (Toy,), {"written": staticmethod(MISTAKES[told])})
    with pytest.raises(RuleError, match=f"^Mistaken.*{told}"):
        program_of(mistaken(), (6, 5))


def test_the_line_of_the_rule_is_named() -> None:
    lines, first = inspect.getsourcelines(Branches)
    line = first + next(i for i, text in enumerate(lines) if "the line that is named" in text)
    told = f"Branches, line {line} of .*test_trace.py: update branches on a value that is known only when it runs"
    with pytest.raises(RuleError, match=f"{told}: use xp.where"):
        program_of(Branches(), (6, 5))


class TooLarge(Toy):
    def entries(self, shape: Any) -> Any:
        return {"average": Moment(over=(1,))}

    def written(self, xp: Any, g: Any, m: Any, lr: Any) -> Any:
        return answer(g, m + g)


def test_state_that_changes_its_shape_is_told() -> None:
    with pytest.raises(RuleError, match="returns state 'average' of shape"):
        program_of(TooLarge(), (6, 5))
