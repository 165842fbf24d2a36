"""thalweg.optax.adafactor equals optax.adafactor, option by option and in combinations, under jit."""

from __future__ import annotations

from typing import Any

import pytest
from lanes import by_turns, once, one_in
from optax_runs import (
    FEWER,
    PREFIX,
    SHAPES,
    TREE,
    compiled,
    error,
    falling,
    fitting,
    matrices,
    problem,
)
from tolerances import FLOAT32, OPTAX_ADAFACTOR

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from thalweg.optax import adafactor  # noqa: E402

pytestmark = pytest.mark.slow

TOLERANCE = {"float64": OPTAX_ADAFACTOR, "float32": FLOAT32}
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])

EACH = {
    "defaults": dict(),
    "learning_rate None": dict(learning_rate=None, decay_rate=0.9),
    "learning_rate schedule": dict(learning_rate=falling),
    "learning_rate of optax": dict(learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.05, 7, 25)),
    "min_dim_size_to_factor 16": dict(min_dim_size_to_factor=16),
    "decay_rate 0.5": dict(decay_rate=0.5),
    "absolute steps": dict(multiply_by_parameter_scale=False),
    "clipping_threshold 0.3": dict(clipping_threshold=0.3),
    "clipping_threshold None": dict(clipping_threshold=None),
    "momentum": dict(momentum=0.9),
    "weight_decay_rate": dict(weight_decay_rate=0.01),
    "weight_decay_rate schedule": dict(weight_decay_rate=falling),
    "eps 0.01": dict(eps=1e-2),
    "eps 0": dict(eps=0.0),
    "not factored": dict(factored=False),
    "mask tree": dict(weight_decay_rate=0.01, weight_decay_mask=TREE),
    "mask prefix": dict(weight_decay_rate=0.01, weight_decay_mask=PREFIX),
    "mask function": dict(weight_decay_rate=0.01, weight_decay_mask=matrices),
    "mask False": dict(weight_decay_rate=0.01, weight_decay_mask=False),
}
TOGETHER = {
    "as T5 has it": dict(
        learning_rate=optax.linear_schedule(0.01, 0.001, 20), min_dim_size_to_factor=32, decay_rate=0.8
    ),
    "absolute with momentum": dict(
        multiply_by_parameter_scale=False, momentum=0.9, clipping_threshold=None, learning_rate=1e-3
    ),
    "schedules and a mask": dict(
        learning_rate=falling, weight_decay_rate=falling, weight_decay_mask=matrices, momentum=0.5
    ),
    "not factored, large eps": dict(
        factored=False, eps=1e-3, clipping_threshold=0.5, weight_decay_rate=0.02, weight_decay_mask=PREFIX
    ),
    "no learning rate, no scale": dict(
        learning_rate=None, multiply_by_parameter_scale=False, clipping_threshold=0.1, momentum=0.8
    ),
    "arrays of jax": dict(
        learning_rate=jnp.float32(0.02),
        decay_rate=jnp.float32(0.6),
        decay_offset=jnp.int32(0),
        clipping_threshold=jnp.float32(2.0),
        momentum=jnp.float32(0.7),
        weight_decay_rate=jnp.float32(0.01),
        eps=jnp.float32(1e-20),
        weight_decay_mask=True,
    ),
    "everything": dict(
        learning_rate=falling,
        min_dim_size_to_factor=1,
        decay_rate=0.7,
        multiply_by_parameter_scale=False,
        clipping_threshold=1.5,
        momentum=0.8,
        weight_decay_rate=falling,
        eps=1e-5,
        weight_decay_mask=TREE,
    ),
}
#: These on all shapes, in either precision; the others on fewer leaves.
FULL = {"defaults", "min_dim_size_to_factor 16", "not factored", *TOGETHER}


@by_turns("row")
@DTYPES
@pytest.mark.parametrize("row", one_in(12, [*EACH, *TOGETHER]))
def test_equals_optax(row: str, dtype: str) -> None:
    params, grads = problem(SHAPES if row in FULL else FEWER, dtype=dtype)
    options = {**EACH, **TOGETHER}[row]
    options = {"learning_rate": 0.01, **options}
    options["weight_decay_mask"] = fitting(options.get("weight_decay_mask"), params)
    if options.get("momentum") is not None:
        options["dtype_momentum"] = dtype
    mine, _ = compiled(adafactor(**options), params, grads)
    theirs, _ = compiled(optax.adafactor(**options), params, grads)
    assert error(mine, theirs, params) < TOLERANCE[dtype]


def test_momentum_of_float64_is_kept_in_float32_by_default_as_optax_does() -> None:
    params, grads = problem(FEWER)
    options = dict(learning_rate=0.01, momentum=0.9)
    mine, state = compiled(adafactor(**options), params, grads)
    theirs, _ = compiled(optax.adafactor(**options), params, grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.exp_avg)} == {jnp.dtype("float32")}
    assert error(mine, theirs, params) < FLOAT32


def test_every_option_of_optax_has_a_row() -> None:
    import inspect

    rows = [*EACH.values(), *TOGETHER.values()]
    assert set(inspect.signature(optax.adafactor).parameters) == {name for options in rows for name in options} | {
        "dtype_momentum"
    }


@once(1)
@DTYPES
def test_a_decay_offset_that_has_been_passed_equals_optax(dtype: str) -> None:
    """State from step 12 on, offset 10: the squares are as at step 3."""
    params, grads = problem(FEWER, dtype=dtype)

    def theirs_past(state: Any) -> Any:
        return (state[0]._replace(count=jnp.asarray(12, jnp.int32)), *state[1:])

    def ours_past(state: Any) -> Any:
        return state._replace(count=jnp.asarray(12, jnp.int32))

    options = dict(learning_rate=0.01, decay_offset=10)
    theirs, _ = compiled(optax.adafactor(**options), params, grads, start=theirs_past)
    mine, _ = compiled(adafactor(**options), params, grads, start=ours_past)
    assert error(mine, theirs, params) < TOLERANCE[dtype]
    without, _ = compiled(adafactor(learning_rate=0.01), params, grads, start=ours_past)
    assert error(without, theirs, params) > 1000 * TOLERANCE[dtype]


@once(2)
@DTYPES
def test_all_leaves_alike_are_stepped_each_by_itself(dtype: str) -> None:
    """Leaves of equal shape are stacked, and give what each gives alone."""
    shapes = dict.fromkeys("abc", (24, 40))
    params, grads = problem(shapes, dtype=dtype)
    options = dict(learning_rate=0.01, min_dim_size_to_factor=8, momentum=0.9, weight_decay_rate=0.01)
    together, _ = compiled(adafactor(**options), params, grads)
    for name in shapes:
        alone, _ = compiled(adafactor(**options), {name: params[name]}, {name: grads[name]})
        assert error({name: together[name]}, alone, {name: params[name]}) < TOLERANCE[dtype]
