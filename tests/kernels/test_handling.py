"""Native code against its rule: what surrounds a rule, how numbers are stored, and stacked tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from lanes import by_turns, one_in
from raw_arrays import copies
from side_by_side import (
    DTYPES,
    Both,
    agree,
    assert_close,
    draw,
    draw_gradients,
    every_dtype,
    every_rule,
    kind,
    made,
    needs_core,
    side_by_side,
)

from thalweg.errors import OptionError

pytestmark = needs_core

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}
#: With all the state that each rule can have.
FULL: dict[str, dict[str, Any]] = {
    "LARS": {},
    "LAMB": {},
    "Adafactor": dict(min_dim_size_to_factor=2, momentum=0.9),
}
PAIRS = list(itertools.product(DTYPES, DTYPES))

AROUND: dict[str, dict[str, Any]] = {
    "maximize": dict(maximize=True),
    "bounded": dict(max_grad_norm=3.0),
    "a bound that is not reached": dict(max_grad_norm=1e6),
    "overrides": dict(
        overrides=[
            ("matrix", dict(lr_scale=0.3, weight_decay=0.0)),
            ("vector", dict(lr_scale=0.0)),
            ("conv", dict(stacked_axes=1)),
            ("number", dict(weight_decay=0.5)),
        ]
    ),
    "schedules": dict(lr=lambda t: 0.1 / t, weight_decay=lambda t: 0.01 * t),
}


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("around", AROUND)
def test_around_the_rule(rule: str, dtype: str, around: str) -> None:
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 3)
    options = {"weight_decay": 0.1, **AROUND[around]}
    if around == "schedules" and rule == "LARS":
        options["momentum"] = lambda t: 1 - 1 / (t + 1)
    agree(rule, params, grads, **options, lockstep=True)


@by_turns("scale")
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
def test_rates_by_name_and_by_call(rule: str) -> None:
    """And flat buffers that are seen in a shape."""
    both = made(rule, "fused"), made(rule, "reference")
    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 3)
    found, expected = copies(params), copies(params)
    for t, step in enumerate(grads):
        for optimizer, arrays in zip(both, (found, expected), strict=True):
            for i, name in enumerate(arrays):
                given = arrays[name].reshape(-1), step[name].reshape(-1)
                optimizer.update(name, *given, shape=SHAPES[name], lr_scale=0.5 * (i + t))
    assert both[0].engine == "fused"
    Both(*both, found, expected, params).agree()


@by_turns()
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


# ---- dtypes


@by_turns("of_parameter")
@every_rule
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0)], ids=str)
@pytest.mark.parametrize(("of_parameter", "of_gradient"), one_in(2, PAIRS))
def test_gradients_in_every_dtype(rule: str, options: dict, of_parameter: str, of_gradient: str) -> None:
    grads = draw_gradients(SHAPES, of_gradient, 3)
    given = {**FULL[rule], **options, "weight_decay": 0.1}
    agree(rule, draw(SHAPES, of_parameter), grads, **given, lockstep=True)


@by_turns("state")
@every_rule
@every_dtype
@pytest.mark.parametrize("factored", [True, False])
@pytest.mark.parametrize(
    ("state", "momentum"), one_in(4, [pair for pair in itertools.product([None, *DTYPES], repeat=2) if any(pair)])
)
def test_state_in_every_dtype(rule: str, dtype: str, factored: bool, state: str | None, momentum: str | None) -> None:
    stored = dict(state_dtype=state, momentum_dtype=momentum)
    for name in filter(None, stored.values()):
        kind(name)
    options = {**(FULL[rule] if factored or rule != "Adafactor" else dict(factored=False, momentum=0.9)), **stored}
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 3)
    agree(rule, params, grads, weight_decay=0.1, **options, lockstep=True)


@every_rule
def test_models_of_mixed_dtypes(rule: str) -> None:
    """All of them in one call, gradients of other dtypes than their parameters among them."""
    params = {f"{a} {b}": draw({"w": (40, 30)}, a, seed=i)["w"] for i, (a, b) in enumerate(PAIRS)}
    grads = [
        {f"{a} {b}": draw({"w": (40, 30)}, b, seed=100 * t + i)["w"] for i, (a, b) in enumerate(PAIRS)}
        for t in range(1, 4)
    ]
    agree(rule, params, grads, **FULL[rule], lockstep=True)


@every_rule
def test_the_dtype_of_a_gradient_may_change_from_step_to_step(rule: str) -> None:
    grads = [draw(SHAPES, dtype, seed=t) for t, dtype in enumerate([*DTYPES, *reversed(DTYPES)], 1)]
    agree(rule, draw(SHAPES, "float32"), grads, **FULL[rule])


# ---- stacks

STACKED: dict[str, tuple[int, dict[str, tuple[int, ...]]]] = {
    "one axis": (1, {"one": (1, 6, 5), "vectors": (5, 40), "matrices": (7, 33, 20), "conv": (3, 9, 4, 8), "n": (6,)}),
    "two axes": (2, {"one": (1, 1, 6, 5), "vectors": (2, 3, 40), "matrices": (3, 2, 33, 20), "numbers": (2, 5)}),
    "many threads": (1, {"large": (2, 300, 250), "many": (300, 17), "between": (3, 16385)}),
    "no elements": (1, {"none": (0, 6, 5), "nothing": (3, 0), "no number": (0,), "w": (3, 5)}),
}


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("stacked", STACKED)
def test_stacked_tensors(rule: str, dtype: str, stacked: str) -> None:
    axes, shapes = STACKED[stacked]
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 3)
    agree(rule, params, grads, stacked_axes=axes, weight_decay=0.1, **FULL[rule], engine="auto", lockstep=True)


@every_rule
def test_one_slice_that_is_zero_does_not_touch_the_others(rule: str) -> None:
    shapes = {"w": (4, 20, 10)}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 2)
    params["w"][1] = 0
    for step in grads:
        step["w"][2] = 0
    both = side_by_side(rule, params, grads, stacked_axes=1, **FULL[rule])
    both.agree()
    assert np.isfinite(both.found["w"]).all()


# ---- what changes between steps


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_state_is_kept_as_changed_options_have_it(engine: str) -> None:
    weights, gradient = np.ones((4, 4), np.float32), np.full((4, 4), 0.1, np.float32)
    optimizer = made("Adafactor", engine, momentum=0.9)
    optimizer.update("w", weights, gradient)
    changed = optimizer.with_state_dtype("float16")
    changed.update("w", weights, gradient)
    assert {entry.dtype.name for key, entry in changed.state["w"].items() if key != "step"} == {"float16"}


def test_a_schedule_that_gives_an_array_is_refused() -> None:
    optimizer, weights = made("LARS", "fused", lr=lambda t: 0.1 if t == 1 else np.ones(2)), np.ones(3)
    optimizer.update("w", weights, np.ones(3))
    with pytest.raises(OptionError, match="lr must be a finite number"):
        optimizer.update("w", weights, np.ones(3))
