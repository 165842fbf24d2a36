"""adafactor, lamb and lars of thalweg.optax equal optax's under jit.

Single options are compared by test_jax_numbers_reference.py with numpy's, and those by tests/published with optax's.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from optax_runs import FEWER, PREFIX, SHAPES, TREE, compiled, error, falling, fitting, matrices, problem
from tolerances import FLOAT32, FLOAT64, OPTAX_ADAFACTOR

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.optax as ours  # noqa: E402

pytestmark = pytest.mark.slow

TOLERANCE = {"float64": FLOAT64, "float32": FLOAT32}
RATES = {"adafactor": 0.01, "lamb": 0.01, "lars": 5.0}
ADAFACTOR: dict[str, dict[str, Any]] = {
    "defaults": dict(),
    "learning_rate None": dict(learning_rate=None, decay_rate=0.9),
    "learning_rate of optax": dict(learning_rate=optax.warmup_cosine_decay_schedule(0.0, 0.05, 7, 25)),
    "clipping_threshold None": dict(clipping_threshold=None),
    "eps 0": dict(eps=0.0),
    "not factored": dict(factored=False),
    "mask prefix": dict(weight_decay_rate=0.01, weight_decay_mask=PREFIX),
    "schedules and a mask": dict(
        learning_rate=falling, weight_decay_rate=falling, weight_decay_mask=matrices, momentum=0.5
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
LAMB: dict[str, dict[str, Any]] = {
    "defaults": dict(),
    "learning_rate of optax": dict(learning_rate=optax.cosine_decay_schedule(0.05, 25)),
    "b2 0": dict(b2=0.0, eps=0.1),
    "weight_decay": dict(weight_decay=0.1),
    "mask prefix": dict(weight_decay=0.1, mask=PREFIX),
    "mask function": dict(weight_decay=0.1, mask=matrices),
    "arrays of jax": dict(
        learning_rate=jnp.float32(0.02),
        b1=jnp.float32(0.8),
        b2=jnp.float32(0.9),
        eps=jnp.float32(1e-3),
        eps_root=jnp.float32(1e-3),
        weight_decay=jnp.float32(0.1),
        mask=True,
    ),
    "everything": dict(
        learning_rate=falling, b1=0.8, b2=0.95, eps=1e-3, eps_root=1e-4, weight_decay=falling, mask=TREE
    ),
}
LARS: dict[str, dict[str, Any]] = {
    "defaults": dict(),
    "learning_rate schedule": dict(learning_rate=lambda count: 10.0 / (count.astype("float32") + 1)),
    "weight_decay": dict(weight_decay=0.1),
    "weight_decay_mask prefix": dict(weight_decay=0.1, weight_decay_mask=PREFIX),
    "trust_ratio_mask prefix": dict(trust_ratio_mask=PREFIX, learning_rate=0.01),
    "trust_ratio_mask False": dict(trust_ratio_mask=False, learning_rate=0.01),
    "momentum 0": dict(momentum=0.0),
    "arrays of jax": dict(
        learning_rate=jnp.float32(2.0),
        weight_decay=jnp.float32(0.1),
        trust_coefficient=jnp.float32(0.01),
        eps=jnp.float32(0.1),
        momentum=jnp.float32(0.8),
    ),
    "both masks": dict(learning_rate=0.1, weight_decay=0.1, weight_decay_mask=TREE, trust_ratio_mask=matrices),
    "everything": dict(
        learning_rate=falling,
        weight_decay=falling,
        weight_decay_mask=matrices,
        trust_coefficient=0.1,
        eps=0.5,
        trust_ratio_mask=TREE,
        momentum=0.7,
        nesterov=True,
    ),
}
ROWS = {"adafactor": ADAFACTOR, "lamb": LAMB, "lars": LARS}
#: These on all shapes, the others on fewer leaves.
FULL = {"not factored", "arrays of jax", "everything", "both masks"}
#: In the ordinary lane, on fewer leaves.
DAY = {("adafactor", "defaults", "float64"), ("lamb", "weight_decay", "float32"), ("lars", "defaults", "float64")}


@pytest.mark.parametrize(
    ("name", "row", "dtype"),
    [
        pytest.param(name, row, dtype, marks=() if (name, row, dtype) in DAY else pytest.mark.nightly)
        for name, rows in ROWS.items()
        for row in rows
        for dtype in ("float64", "float32")
    ],
)
def test_equals_optax(name: str, row: str, dtype: str) -> None:
    params, grads = problem(SHAPES if row in FULL else FEWER, dtype=dtype)
    options = {"learning_rate": RATES[name], **ROWS[name][row]}
    options = {option: fitting(value, params) for option, value in options.items()}
    if name == "adafactor" and options.get("momentum") is not None:
        options["dtype_momentum"] = dtype
    if name != "adafactor":  # so that optax computes powers of them in the precision of the parameters
        options = {o: value.astype(dtype) if isinstance(value, jax.Array) else value for o, value in options.items()}
    mine, _ = compiled(getattr(ours, name)(**options), params, grads)
    theirs, _ = compiled(getattr(optax, name)(**options), params, grads)
    tolerance = OPTAX_ADAFACTOR if (name, dtype) == ("adafactor", "float64") else TOLERANCE[dtype]
    assert error(mine, theirs, params) < tolerance


def test_every_option_of_optax_has_a_row() -> None:
    for name, rows in ROWS.items():
        named = {option for options in rows.values() for option in options}
        added = {"dtype_momentum"} if name == "adafactor" else set()
        assert set(inspect.signature(getattr(optax, name)).parameters) == named | added


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_a_mask_that_is_ignored_would_be_noticed(name: str) -> None:
    params, grads = problem(FEWER)
    mask = "mask" if name == "lamb" else "weight_decay_mask"
    mine, _ = compiled(getattr(ours, name)(RATES[name], weight_decay=0.1), params, grads)
    masked = getattr(optax, name)(RATES[name], weight_decay=0.1, **{mask: fitting(TREE, params)})
    theirs, _ = compiled(masked, params, grads)
    assert error(mine, theirs, params) > 1000 * FLOAT32


@pytest.mark.nightly
def test_momentum_of_float64_is_kept_in_float32_by_default_as_optax_does() -> None:
    params, grads = problem(FEWER)
    mine, state = compiled(ours.adafactor(0.01, momentum=0.9), params, grads)
    theirs, _ = compiled(optax.adafactor(0.01, momentum=0.9), params, grads)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.exp_avg)} == {jnp.dtype("float32")}
    assert error(mine, theirs, params) < FLOAT32


@pytest.mark.nightly
def test_a_decay_offset_that_has_been_passed_equals_optax() -> None:
    """State from step 12 on, offset 10: the squares are as at step 3."""
    params, grads = problem(FEWER)

    def theirs_past(state: Any) -> Any:
        return (state[0]._replace(count=jnp.asarray(12, jnp.int32)), *state[1:])

    def ours_past(state: Any) -> Any:
        return state._replace(count=jnp.asarray(12, jnp.int32))

    theirs, _ = compiled(optax.adafactor(0.01, decay_offset=10), params, grads, start=theirs_past)
    mine, _ = compiled(ours.adafactor(0.01, decay_offset=10), params, grads, start=ours_past)
    assert error(mine, theirs, params) < OPTAX_ADAFACTOR
    without, _ = compiled(ours.adafactor(0.01), params, grads, start=ours_past)
    assert error(without, theirs, params) > 1000 * OPTAX_ADAFACTOR


def test_leaves_alike_are_stacked_and_stepped_each_by_itself() -> None:
    params, grads = problem(dict.fromkeys("ab", (6, 5)), steps=5)
    solver = ours.adafactor(0.01, min_dim_size_to_factor=4, momentum=0.9, weight_decay_rate=0.01)
    together, _ = compiled(solver, params, grads)
    for name in params:
        alone, _ = compiled(solver, {name: params[name]}, {name: grads[name]})
        assert error({name: together[name]}, alone, {name: params[name]}) < OPTAX_ADAFACTOR
