"""What a step takes, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from thalweg.arrays import Shape
from thalweg.programs.footprint import Footprint, footprint
from thalweg.rules import RULES, Rule, Update
from thalweg.rules.entries import Entry
from thalweg.settings import Settings

SHAPE = (400, 320)
ONE = 4 * 400 * 320


def needed(rule: str, dtype: str = "float32", shape: tuple[int, ...] = SHAPE, **ways: Any) -> Footprint:
    options = ways.pop("options", {})
    return footprint(Settings(RULES[rule], options).base, shape, dtype, **ways)


@dataclass(frozen=True, kw_only=True)
class Plain(Rule):
    """Its square has a name; the product does not."""

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {}

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        square = g * g
        return Update(square * g + square, {}, True, {})


def test_what_has_no_name_is_let_go_at_once() -> None:
    """square, square * g and their sum. The new parameter is there later."""
    found = footprint(replace(Settings(RULES["LARS"], {}).base, rule=Plain()), SHAPE, "float32")
    assert (found.peak, found.parameter, found.state) == (3 * ONE, ONE, 0)


def test_narrow_parameters_are_widened() -> None:
    plain = {"trust": False, "momentum": 0.0}
    wide, narrow = needed("LARS", options=plain), needed("LARS", "bfloat16", options=plain)
    # float32 copies of p and g stay for the whole step, and the new p is rounded into half as much
    assert narrow.peak > wide.peak + ONE
    assert narrow.parameter == ONE // 2


def test_results_are_the_new_parameter_and_its_state() -> None:
    found = needed("LAMB")
    assert found.parameter == ONE
    assert found.result == pytest.approx(3 * ONE, abs=2**12)
    assert needed("LAMB", options={"state_dtype": "bfloat16"}).state == pytest.approx(ONE, abs=2**12)


def test_a_shard_is_treated_as_its_whole_is() -> None:
    """Adafactor would keep all squares of so few rows, if they were a parameter by themselves."""
    assert needed("Adafactor", shape=(50, 320), whole=SHAPE).state < 4 * (50 + 320) + 2**12
    assert needed("Adafactor", shape=(50, 320)).state >= 4 * 50 * 320


def test_products_are_those_of_the_rule() -> None:
    assert needed("Kron", shape=(30, 30), refresh=False).flops == 4 * 2 * 30**3
    assert needed("Kron", shape=(30, 30)).flops > 4 * 2 * 30**3
    assert needed("LAMB", shape=(30, 30)).flops == 0


def test_owners_do_the_middle_part() -> None:
    whole, rest = needed("Kron", shape=(256, 256)), needed("Kron", shape=(256, 256), whole=(256, 256), by_owners=True)
    assert rest.flops == 0
    assert 0 < rest.waiting < whole.peak
    assert rest.peak < whole.peak


def test_sums_are_told() -> None:
    (together,) = needed("LARS").reductions
    assert [(own.kind, own.axes) for own in together] == [("sum", None), ("sum", None)]
