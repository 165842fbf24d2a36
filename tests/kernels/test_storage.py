"""Native code against its rule: gradients and state in other dtypes than the parameter, and stacked tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from lanes import by_turns
from raw_arrays import bits, copies
from side_by_side import (
    DTYPES,
    agree,
    assert_close,
    draw,
    draw_gradients,
    every_dtype,
    every_rule,
    kind,
    made,
    needs_core,
)

pytestmark = needs_core

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}
FACTORED = dict(min_dim_size_to_factor=2, momentum=0.9)
#: With all the state that each rule can have.
FULL: dict[str, dict[str, Any]] = {"LARS": {}, "LAMB": {}, "Adafactor": FACTORED}


@by_turns()
@every_rule
@pytest.mark.parametrize(("of_parameter", "of_gradient"), list(itertools.product(DTYPES, DTYPES)))
def test_gradients_in_every_dtype(rule: str, of_parameter: str, of_gradient: str) -> None:
    grads = draw_gradients(SHAPES, of_gradient, 3)
    agree(rule, draw(SHAPES, of_parameter), grads, weight_decay=0.1, **FULL[rule], lockstep=True)


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("option", ["state_dtype", "momentum_dtype"])
@pytest.mark.parametrize("stored", DTYPES)
def test_state_in_every_dtype(rule: str, dtype: str, option: str, stored: str) -> None:
    kind(stored)
    options = {**FULL[rule], option: stored}
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 3)
    agree(rule, params, grads, weight_decay=0.1, **options, lockstep=True)
    if rule == "Adafactor":
        agree(rule, params, grads, weight_decay=0.1, factored=False, momentum=0.9, **{option: stored}, lockstep=True)


@every_rule
def test_both_kinds_of_state_in_dtypes_of_their_own(rule: str) -> None:
    for first, second in itertools.permutations(DTYPES, 2):
        kind(first), kind(second)
        options = dict(FULL[rule], state_dtype=first, momentum_dtype=second, weight_decay=0.1)
        agree(rule, draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2), **options, lockstep=True)


@every_rule
def test_models_of_mixed_dtypes(rule: str) -> None:
    """All of them in one call, gradients of other dtypes than their parameters among them."""
    pairs = list(itertools.product(DTYPES, DTYPES))
    params = {f"{a} {b}": draw({"w": (40, 30)}, a, seed=i)["w"] for i, (a, b) in enumerate(pairs)}
    grads = [
        {f"{a} {b}": draw({"w": (40, 30)}, b, seed=100 * t + i)["w"] for i, (a, b) in enumerate(pairs)}
        for t in range(1, 4)
    ]
    agree(rule, params, grads, **FULL[rule], lockstep=True)


@every_rule
def test_the_dtype_of_a_gradient_may_change_from_step_to_step(rule: str) -> None:
    grads = [draw(SHAPES, dtype, seed=t) for t, dtype in enumerate([*DTYPES, *reversed(DTYPES)], 1)]
    agree(rule, draw(SHAPES, "float32"), grads, **FULL[rule])


STACKED: dict[int, dict[str, tuple[int, ...]]] = {
    1: {"one": (1, 6, 5), "vectors": (5, 40), "matrices": (7, 33, 20), "tensors": (3, 9, 4, 8), "numbers": (6,)},
    2: {"one": (1, 1, 6, 5), "vectors": (2, 3, 40), "matrices": (3, 2, 33, 20), "numbers": (2, 5)},
}


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("axes", STACKED)
def test_stacked_tensors(rule: str, dtype: str, axes: int) -> None:
    shapes = STACKED[axes]
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 3)
    agree(rule, params, grads, stacked_axes=axes, weight_decay=0.1, **FULL[rule], lockstep=True)


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_stacked_tensors_that_many_threads_step(rule: str, dtype: str) -> None:
    shapes = {"large": (2, 300, 250), "many": (300, 17), "between": (3, 16385)}
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 2)
    agree(rule, params, grads, stacked_axes=1, **FULL[rule])


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_stack_is_its_slices_one_by_one(rule: str, dtype: str) -> None:
    """In float64 to the bit; rules round the norms of slices to float32 where that is the precision."""
    shapes = {"w": (5, 33, 20)}
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 3)
    slices = {str(i): x.copy() for i, x in enumerate(params["w"])}
    together, apart = made(rule, "fused", stacked_axes=1, **FULL[rule]), made(rule, "fused", **FULL[rule])
    for step in grads:
        together.step(params, step)
        apart.step(slices, {str(i): g for i, g in enumerate(step["w"])})
    for i in range(5):
        own, alone = {"p": params["w"][i]}, {"p": slices[str(i)]}
        own |= {key: entry[i] for key, entry in together.state["w"].items() if key != "step"}
        own |= {key: np.array(figures[i]) for key, figures in together.stats()["w"].items()}
        alone |= {key: entry for key, entry in apart.state[str(i)].items() if key != "step"}
        alone |= {key: np.array(figure) for key, figure in apart.stats()[str(i)].items()}
        assert list(own) == list(alone)
        for key, entry in alone.items():
            assert dtype == "float32" or bits(own[key]) == bits(entry), key
            assert_close(key, own[key], entry, dtype)


@by_turns()
@every_rule
@pytest.mark.parametrize("shape", [(0, 6, 5), (3, 0), (0,)], ids=str)
def test_stacks_without_elements(rule: str, shape: tuple[int, ...]) -> None:
    shapes = {"empty": shape, "w": (3, 5)}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 2)
    agree(rule, params, grads, stacked_axes=1, engine="auto")


@every_rule
def test_one_slice_that_is_zero_does_not_touch_the_others(rule: str) -> None:
    shapes = {"w": (4, 20, 10)}
    params, grads = draw(shapes, "float32"), draw_gradients(shapes, "float32", 2)
    params["w"][1] = 0
    for step in grads:
        step["w"][2] = 0
    agree(rule, copies(params), grads, stacked_axes=1, **FULL[rule])
    assert np.isfinite(params["w"]).all()
