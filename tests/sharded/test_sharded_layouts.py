"""Sharded equals unsharded: parameters and state, for every layout."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from lanes import by_turns, one_in
from world import world
from world_layouts import LAYOUTS
from world_steps import RULES, TYPICAL, Run, cases_for, differences, differences_untraced, stepped_errors

pytestmark = pytest.mark.slow

LAID_OUT = pytest.mark.parametrize(
    ("size", "layout"), one_in(8, [(size, layout) for size, layouts in LAYOUTS.items() for layout in layouts], first=2)
)


def check(size: int, run: Run, layout: str) -> None:
    """That no rank finds a difference to one process."""
    assert world(size).run(differences, run, layout) == [[]] * size


@by_turns()
@cases_for((*RULES, "kron_and_others", "Layerwise"))
@LAID_OUT
@pytest.mark.parametrize(("dtype", "engine"), [("float64", "auto"), ("float32", "auto"), ("float64", "foreach")])
def test_every_layout_gives_the_numbers_of_one_process(
    rule: str, size: int, layout: str, dtype: str, engine: str
) -> None:
    check(size, Run(rule, dtype, engine=engine), layout)


@by_turns()
@pytest.mark.parametrize("rule", ["LARS", "LAMB", "Layerwise"])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "mixed"), (4, "two axes")])
def test_native_code_by_name(rule: str, size: int, layout: str) -> None:
    check(size, Run(rule, engine="fused"), layout)


@by_turns()
@pytest.mark.parametrize("rule", ["LARS", "LAMB", "Adafactor"])
@pytest.mark.parametrize("options", [{}, dict(on_nonfinite="raise")], ids=str)
def test_rules_that_cannot_be_traced(rule: str, options: dict[str, str]) -> None:
    """Each bucket then sends messages of its own."""
    run = Run(rule, options=dict(TYPICAL[rule], **options))
    assert world(2).run(differences_untraced, run, "first axis") == [[]] * 2


#: Of those that have rows.
MATRICES = ("matrix", "even", "cube", "kernel")


def test_a_rule_of_ones_own_that_needs_whole_tensors() -> None:
    check(2, Run("Centred", names=MATRICES), "mixed")
    check(2, Run("Measured", names=MATRICES), "mixed")


def test_a_rule_that_does_not_tell_its_parts_is_refused() -> None:
    for first, *_ in world(2).run(stepped_errors, Run("InOnePart", names=MATRICES), "first axis"):
        assert "InOnePart needs whole tensors, and parameter 'matrix' is sharded: derive the rule from" in first
