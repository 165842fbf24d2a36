"""When temporaries are computed and let go, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from thalweg.arrays import Shape
from thalweg.programs.liveness import Lifetimes, in_turn, lifetimes, listed, products_of
from thalweg.rules import RULES, Rule, Update
from thalweg.rules.entries import Entry
from thalweg.settings import Settings

SHAPE = (400, 300)
ONE = 4 * 400 * 300


def needed(rule: str, dtype: str = "float32", shape: tuple[int, ...] = SHAPE, **ways: Any) -> Lifetimes:
    options = ways.pop("options", {})
    return lifetimes(Settings(RULES[rule], options).base, shape, dtype, **ways)


@dataclass(frozen=True, kw_only=True)
class Plain(Rule):
    """Its square has a name; the product does not."""

    def validate(self) -> None:
        super().validate()

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {}

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        square = g * g
        return Update(square * g + square, {}, True, {})


@pytest.mark.parametrize(("library", "arrays"), [("torch", 3), ("numpy", 2)])
def test_what_has_no_name_is_let_go_at_once(library: Any, arrays: int) -> None:
    """square, square * g and their sum; numpy writes the sum over the product. The new parameter is there later."""
    setting = replace(Settings(RULES["LARS"], {}).base, rule=Plain())
    found = lifetimes(setting, SHAPE, "float32", library=library)
    assert found == Lifetimes((ONE, 2 * ONE, arrays * ONE, 2 * ONE), ONE, 0, 0)
    assert found.peak == arrays * ONE


def test_narrow_parameters_are_widened() -> None:
    plain = {"trust": False, "momentum": 0.0}
    wide, narrow = needed("LARS", options=plain), needed("LARS", "bfloat16", options=plain)
    # float32 copies of p and g stay for the whole step, and the new p is rounded into half as much
    assert narrow.peak > wide.peak + ONE
    assert narrow.parameter == ONE // 2


def test_results_are_the_new_parameter_and_its_state() -> None:
    found = needed("LAMB")
    assert found.parameter == ONE
    assert found.state == pytest.approx(2 * ONE, abs=2**10)
    assert needed("LAMB", options={"state_dtype": "bfloat16"}).state == pytest.approx(ONE, abs=2**10)


def test_a_list_holds_what_its_parameters_hold_at_the_same_moment() -> None:
    small, large = needed("LAMB", shape=(40, 30)), needed("LAMB")
    assert listed([large] * 3).peak == 3 * large.peak
    assert listed([small, large]).peak == small.peak + large.peak
    assert listed([]).peak == 0
    # the first has its peak before the second
    early, late = Lifetimes((9, 1, 1), 1), Lifetimes((1, 5, 1), 1)
    assert listed([early, late]).peak == 10
    assert listed([early, late]).result == 2


def test_a_result_stays_until_the_next_is_there() -> None:
    steps = [Lifetimes((7, 5), 2, 3), Lifetimes((6,), 1, 1), Lifetimes((1,), 1, 1)]
    assert in_turn(steps) == 2 + 3 + 6
    assert in_turn(steps, committed=True) == 2 + 6
    assert in_turn(reversed(steps)) == 1 + 1 + 7
    assert in_turn(steps, together=True) == 5 + 6
    assert in_turn([*steps, Lifetimes((9,), 1, 0)], together=True) == 5 + 2 + 2 + 9
    assert in_turn([]) == 0
    stack = Lifetimes((7, 5), 2, 3, inputs=1)
    assert in_turn([stack, *steps], committed=True) == 2 + 3 + 7


def test_a_stack_is_copied() -> None:
    """Into a parameter, a gradient and state with a leading axis more."""
    found = needed("Kron", shape=(10, 10), stack=6, given_noise=True)
    factors, norms = 2 * 100, 2
    assert found.inputs == 6 * 4 * (100 + 100 + 100 + factors + norms)
    assert found.peak > found.inputs


def test_a_shard_is_treated_as_its_whole_is() -> None:
    """Adafactor would keep all squares of so few rows, if they were a parameter by themselves."""
    shard = needed("Adafactor", shape=(50, 300), whole=SHAPE)
    assert shard.state < 4 * (50 + 300) + 2**10
    assert needed("Adafactor", shape=(50, 300)).state > 4 * 50 * 300


def test_products_are_those_of_the_rule() -> None:
    kron = Settings(RULES["Kron"], {}).base
    assert products_of(kron, (30, 30), "float32", False).flops == 4 * 2 * 30**3
    assert products_of(kron, (30, 30), "float32", True).flops > 4 * 2 * 30**3
    assert products_of(Settings(RULES["LAMB"], {}).base, (30, 30), "float32", True).flops == 0
