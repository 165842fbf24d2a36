"""Native code keeps its tables from step to step: whatever changes in between, steps are those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from raw_arrays import FRONT_END
from side_by_side import Both, copies, draw, draw_gradients, needs_core

from thalweg.errors import OptimError

pytestmark = needs_core

SHAPES = {"w": (3, 4), "b": (5,), "v": (4, 3)}
RULES: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "LAMB": dict(lr=0.05, weight_decay=0.1),
    "Adafactor": dict(lr=0.05, min_dim_size_to_factor=2, momentum=0.9, weight_decay=0.1),
}
every_rule = pytest.mark.parametrize("rule", RULES)
each_way = pytest.mark.parametrize("whole", [True, False], ids=["whole model", "name by name"])


class Trainings:
    """The same arrays stepped by both engines."""

    def __init__(self, rule: str, whole: bool, **options: Any) -> None:
        self.start, self.whole = draw(SHAPES, "float64"), whole
        self.arrays = [copies(self.start), copies(self.start)]
        given = {**RULES[rule], **options}
        self.optimizers = [FRONT_END[rule](**given, engine=engine) for engine in ("auto", "reference")]
        self.gradients = iter(draw_gradients(SHAPES, "float64", 12))

    def step(self, names: tuple[str, ...] = tuple(SHAPES), how: Callable[[Any], Any] = np.copy) -> str:
        """A step by both, of some arrays, and what it raised."""
        drawn, said = next(self.gradients), []
        for optimizer, arrays in zip(self.optimizers, self.arrays, strict=True):
            given = {name: how(drawn[name]) for name in names}
            try:
                if self.whole:
                    optimizer.step({name: arrays[name] for name in names}, given)
                else:
                    for name, g in given.items():
                        optimizer.update(name, arrays[name], g)
                said.append("")
            except OptimError as error:
                said.append(str(error))
        assert said[0] == said[1]
        for name in names if not said[0] else ():
            pair = [{name: arrays[name]} for arrays in self.arrays]
            Both(*self.optimizers, *pair, self.start).agree()
        return said[0]

    def change(self, how: Callable[[Any], Any], name: str = "w") -> None:
        for arrays in self.arrays:
            arrays[name] = how(arrays[name])

    def change_options(self, **options: Any) -> None:
        self.optimizers = [optimizer.with_options(**options) for optimizer in self.optimizers]


@every_rule
@each_way
def test_arrays_that_move(rule: str, whole: bool) -> None:
    both = Trainings(rule, whole)
    for how in (np.copy, np.copy, lambda g: np.stack([g, g], -1)[..., 0], np.asfortranarray, np.copy):
        assert both.step(how=how) == ""
    for change in (np.copy, lambda x: x + 1.0, np.asfortranarray, np.ascontiguousarray):
        both.change(change)
        assert both.step() == ""


@every_rule
@each_way
def test_arrays_that_come_and_go(rule: str, whole: bool) -> None:
    both = Trainings(rule, whole)
    for names in (("w", "b"), ("w",), tuple(SHAPES), ("v", "w"), ("w", "b"), tuple(SHAPES)):
        assert both.step(names) == ""


@each_way
def test_other_dtypes_and_shapes(whole: bool) -> None:
    both = Trainings("AdamW", whole)
    both.step()
    assert both.step(how=lambda g: g.astype("float32")) == ""
    assert both.step() == ""
    both.change(lambda x: x[:2].copy())
    assert "'w'" in both.step()


@every_rule
@each_way
def test_options_that_change(rule: str, whole: bool) -> None:
    both = Trainings(rule, whole)
    both.step()
    for options in (dict(lr=0.02), dict(weight_decay=0.3), dict(weight_decay=0.0), dict(maximize=True), dict(lr=0.01)):
        both.change_options(**options)
        assert both.step() == ""
        assert both.step() == ""


@every_rule
@each_way
def test_functions_of_the_step_that_pass_through_0(rule: str, whole: bool) -> None:
    both = Trainings(rule, whole, weight_decay=lambda t: (0.0, 0.2, 0.4, 0.0, 0.1)[t % 5], lr=lambda t: 0.1 / t)
    assert [both.step() for _ in range(8)] == [""] * 8
    assert both.optimizers[0].engine == "fused"
