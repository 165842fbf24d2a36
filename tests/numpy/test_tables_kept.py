"""Native code keeps its tables from step to step: whatever changes in between, steps are those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import FRONT_END, copies
from side_by_side import Both, needs_core

pytestmark = needs_core

SHAPES = {"w": (3, 4), "b": (5,), "v": (4, 3)}
RULES: dict[str, dict[str, Any]] = {
    "SGD": dict(lr=0.1, momentum=0.9, weight_decay=0.1),
    "AdamW": dict(lr=0.01, weight_decay=0.1),
    "LAMB": dict(lr=0.05, weight_decay=0.1),
    "Adafactor": dict(lr=0.05, min_dim_size_to_factor=2, momentum=0.9, weight_decay=0.1),
}
EVERY = tuple(SHAPES)
#: For each step the names that have a gradient, what is done to gradients, to the arrays before it, and to options.
Event = tuple[tuple[str, ...], Callable[[Any], Any], Callable[[Any], Any], dict[str, Any]]


def same(x: Any) -> Any:
    return x


HISTORIES: dict[str, list[Event]] = {
    "arrays move": [
        (EVERY, np.copy, how, {}) for how in (same, np.copy, lambda x: x + 1.0, np.asfortranarray, np.ascontiguousarray)
    ],
    "arrays come and go": [
        (names, np.copy, same, {}) for names in (("w", "b"), ("w",), EVERY, ("v", "w"), ("w", "b"), EVERY)
    ],
    "options change": [
        (EVERY, np.copy, same, options)
        for options in ({}, dict(lr=0.02), {}, dict(weight_decay=0.3), dict(weight_decay=0.0), dict(maximize=True), {})
    ],
    "functions pass through 0": [
        (EVERY, np.copy, same, dict(weight_decay=lambda t: (0.0, 0.2, 0.4, 0.0)[t % 4], lr=lambda t: 0.1 / t)),
        *[(EVERY, np.copy, same, {})] * 6,
    ],
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "name by name"])
def test_steps_are_those_of_the_reference(rule: str, history: str, whole: bool) -> None:
    start, gradients = draw(SHAPES, "float64"), iter(draw_gradients(SHAPES, "float64", 12))
    arrays = [copies(start), copies(start)]
    optimizers = [FRONT_END[rule](**RULES[rule], engine=engine) for engine in ("auto", "reference")]
    for names, how, move, options in HISTORIES[history]:
        drawn = next(gradients)
        for place in range(2):
            arrays[place]["w"] = move(arrays[place]["w"])
            optimizer = optimizers[place] = optimizers[place].with_options(**options) if options else optimizers[place]
            given = {name: how(drawn[name]) for name in names}
            if whole:
                optimizer.step({name: arrays[place][name] for name in names}, given)
            else:
                for name, g in given.items():
                    optimizer.update(name, arrays[place][name], g)
        for name in names:
            Both(*optimizers, *({name: own[name]} for own in arrays)).agree()
    assert "fused" in optimizers[0].engine
