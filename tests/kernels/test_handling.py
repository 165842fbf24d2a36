"""Native code against its rule: what surrounds a rule, and what may differ between parameters and steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import copies
from side_by_side import (
    Both,
    agree,
    assert_close,
    draw,
    draw_gradients,
    every_dtype,
    every_rule,
    made,
    needs_core,
    side_by_side,
)

pytestmark = needs_core

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}


@every_rule
@every_dtype
@pytest.mark.parametrize("options", [dict(maximize=True), dict(max_grad_norm=3.0), dict(max_grad_norm=1e6)], ids=str)
def test_around_the_rule(rule: str, dtype: str, options: dict) -> None:
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 3)
    agree(rule, params, grads, weight_decay=0.1, **options, lockstep=True)


@pytest.mark.parametrize("scale", [1e-25, 1e-22, 1e-20, 1e-3, 1e15, 1e18, 1e25], ids=str)
@pytest.mark.parametrize("size", [5, 1025, 70_000])
def test_the_joint_norm_of_gradients_however_large_they_are(scale: float, size: int) -> None:
    """What goes down to max_grad_norm is measured in float64."""
    shapes = {"a": (size,), "b": (3,)}
    grads = draw_gradients(shapes, "float32", 1, scale=scale)
    options = dict(trust=False, momentum=0.0, max_grad_norm=scale / 10, lr=1 / scale)
    both = side_by_side("LARS", draw(shapes, "float32"), grads, **options)
    for name, expected in both.expected.items():
        assert_close(name, both.found[name], expected, "float32")


@every_rule
@pytest.mark.parametrize("of_gradient", ["float32", "bfloat16", "float16"])
def test_the_joint_norm_of_narrow_gradients_is_as_exact_as_wide_parameters(rule: str, of_gradient: str) -> None:
    grads = draw_gradients(SHAPES, of_gradient, 2)
    agree(rule, draw(SHAPES, "float64"), grads, max_grad_norm=1.0, weight_decay=0.1)


@every_rule
def test_gradients_that_reach_the_joint_norm_in_strange_layouts(rule: str) -> None:
    shapes = {"w": (40, 30), "v": (40, 30)}
    params, (step,) = draw(shapes, "float32"), draw_gradients(shapes, "float32", 1)
    strange = {"w": np.asfortranarray(step["w"]), "v": np.repeat(step["v"], 2, axis=1)[:, ::2]}
    agree(rule, params, [strange], max_grad_norm=1.0)


@every_rule
def test_schedules_are_functions_of_the_step(rule: str) -> None:
    options: dict[str, Any] = dict(lr=lambda t: 0.1 / t, weight_decay=lambda t: 0.01 * t)
    if rule == "LARS":
        options["momentum"] = lambda t: 1 - 1 / (t + 1)
    grads = draw_gradients(SHAPES, "float64", 4)
    agree(rule, draw(SHAPES, "float64"), grads, **options)


@every_rule
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_overrides_by_name(rule: str, dtype: str) -> None:
    overrides: list[Any] = [("matrix", dict(lr_scale=0.3, weight_decay=0.0)), ("vector", dict(lr_scale=0.0))]
    overrides += [("conv", dict(stacked_axes=1)), ("number", dict(weight_decay=0.5))]
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 3)
    agree(rule, params, grads, weight_decay=0.1, overrides=overrides)


@every_rule
def test_rates_by_name_and_by_call(rule: str) -> None:
    both = made(rule, "fused"), made(rule, "reference")
    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 3)
    found, expected = copies(params), copies(params)
    for t, step in enumerate(grads):
        for optimizer, arrays in zip(both, (found, expected), strict=True):
            for i, name in enumerate(arrays):
                optimizer.update(name, arrays[name], step[name], lr_scale=0.5 * (i + t))
    Both(*both, found, expected, params).agree()


@every_rule
def test_flat_buffers_are_seen_in_a_shape(rule: str) -> None:
    both = made(rule, "fused"), made(rule, "reference")
    params = draw({"w": (600,)}, "float32")
    found, expected = copies(params), copies(params)
    for step in draw_gradients({"w": (600,)}, "float32", 3):
        for optimizer, arrays in zip(both, (found, expected), strict=True):
            optimizer.update("w", arrays["w"], step["w"], shape=(20, 30))
    assert both[0].engine == "fused"
    Both(*both, found, expected, params).agree()


@every_rule
@pytest.mark.parametrize("global_step", [False, True])
def test_parameters_without_a_gradient_now_and_then(rule: str, global_step: bool) -> None:
    """Each has its own count of steps, or all the same; tables are made anew, and then again not."""
    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 7)
    for t, missing in enumerate(["matrix", "vector", None, "number", "matrix", None]):
        if missing is not None:
            grads[t][missing] = None
    agree(rule, params, grads, global_step=global_step)


@every_rule
def test_engines_may_take_turns(rule: str) -> None:
    """In the middle of a run, with the state handed over as it is."""
    turns, steady = made(rule, "fused"), made(rule, "reference")
    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 6)
    found, expected = copies(params), copies(params)
    for t, step in enumerate(grads):
        turns = turns.with_engine("reference" if t % 2 else "fused")
        turns.step(found, step)
        assert turns.engine == ("reference" if t % 2 else "fused")
        steady.step(expected, step)
    Both(turns, steady, found, expected, params).agree()
