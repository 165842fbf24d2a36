"""thalweg.optax.lamb and lars equal optax's, option by option and in combinations, under jit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lanes import by_turns, one_in
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
from tolerances import FLOAT32, FLOAT64

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from thalweg.optax import lamb, lars  # noqa: E402

pytestmark = pytest.mark.slow

TOLERANCE = {"float64": FLOAT64, "float32": FLOAT32}
DTYPES = pytest.mark.parametrize("dtype", ["float64", "float32"])

LAMB: dict[str, dict[str, Any]] = {
    "defaults": dict(),
    "learning_rate schedule": dict(learning_rate=falling),
    "learning_rate of optax": dict(learning_rate=optax.cosine_decay_schedule(0.05, 25)),
    "b1 0.5": dict(b1=0.5),
    "b1 0": dict(b1=0.0),
    "b2 0.9": dict(b2=0.9),
    "b2 0": dict(b2=0.0, eps=0.1),
    "eps 0.1": dict(eps=0.1),
    "eps_root 0.1": dict(eps_root=0.1),
    "weight_decay": dict(weight_decay=0.1),
    "weight_decay schedule": dict(weight_decay=falling),
    "mask tree": dict(weight_decay=0.1, mask=TREE),
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
    "no memory, heavy decay": dict(b1=0.0, b2=0.0, eps=0.5, weight_decay=1.0, mask=PREFIX),
}

LARS: dict[str, dict[str, Any]] = {
    "defaults": dict(),
    "learning_rate schedule": dict(learning_rate=lambda count: 10.0 / (count + 1)),
    "weight_decay": dict(weight_decay=0.1),
    "weight_decay schedule": dict(weight_decay=falling),
    "weight_decay_mask tree": dict(weight_decay=0.1, weight_decay_mask=TREE),
    "weight_decay_mask prefix": dict(weight_decay=0.1, weight_decay_mask=PREFIX),
    "weight_decay_mask function": dict(weight_decay=0.1, weight_decay_mask=matrices),
    "trust_coefficient": dict(trust_coefficient=0.02),
    "eps": dict(eps=5.0),
    "trust_ratio_mask tree": dict(trust_ratio_mask=TREE, learning_rate=0.01),
    "trust_ratio_mask prefix": dict(trust_ratio_mask=PREFIX, learning_rate=0.01),
    "trust_ratio_mask function": dict(trust_ratio_mask=matrices, learning_rate=0.01),
    "trust_ratio_mask False": dict(trust_ratio_mask=False, learning_rate=0.01),
    "momentum 0.5": dict(momentum=0.5),
    "momentum 0": dict(momentum=0.0),
    "nesterov": dict(nesterov=True),
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


#: These on all shapes, in either precision; the others on fewer leaves.
FULL = {"defaults", "arrays of jax", "everything", "no memory, heavy decay", "both masks"}


def agree(mine: Any, theirs: Any, row: str, options: dict, dtype: str) -> None:
    params, grads = problem(SHAPES if row in FULL else FEWER, dtype=dtype)
    options = {name: fitting(value, params) for name, value in options.items()}
    # so that optax computes powers of them in the precision of the parameters
    options = {name: value.astype(dtype) if isinstance(value, jax.Array) else value for name, value in options.items()}
    ours, _ = compiled(mine(**options), params, grads)
    others, _ = compiled(theirs(**options), params, grads)
    assert error(ours, others, params) < TOLERANCE[dtype]


@by_turns()
@DTYPES
@pytest.mark.parametrize("row", one_in(8, LAMB, first=2))
def test_lamb_equals_optax(row: str, dtype: str) -> None:
    agree(lamb, optax.lamb, row, {"learning_rate": 0.01, **LAMB[row]}, dtype)


@by_turns()
@DTYPES
@pytest.mark.parametrize("row", one_in(8, LARS))
def test_lars_equals_optax(row: str, dtype: str) -> None:
    agree(lars, optax.lars, row, {"learning_rate": 5.0, **LARS[row]}, dtype)


@pytest.mark.parametrize(("theirs", "rows"), [(optax.lamb, LAMB), (optax.lars, LARS)], ids=["lamb", "lars"])
def test_every_option_of_optax_has_a_row(theirs: Any, rows: dict) -> None:
    assert set(inspect.signature(theirs).parameters) == {name for options in rows.values() for name in options}


@pytest.mark.parametrize(("mine", "theirs", "lr"), [(lamb, optax.lamb, 0.01), (lars, optax.lars, 5.0)])
def test_a_mask_that_is_ignored_would_be_noticed(mine: Any, theirs: Any, lr: float) -> None:
    """The problem tells apart a masked decay from one that is not."""
    params, grads = problem(FEWER)
    name = "mask" if mine is lamb else "weight_decay_mask"
    ours, _ = compiled(mine(lr, weight_decay=0.1), params, grads)
    others, _ = compiled(theirs(lr, weight_decay=0.1, **{name: fitting(TREE, params)}), params, grads)
    assert error(ours, others, params) > 1000 * FLOAT32
