"""Parameters of flax and equinox, in their own containers and their own training loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import once
from optax_runs import MADE, each

from thalweg import UnusedOverrideWarning
from thalweg.optax import lamb

pytestmark = pytest.mark.nightly  # many small programs are compiled

X = np.cos(np.arange(20, dtype=np.float32)).reshape(5, 4)


def flat_steps(name: str, leaves: list[Any], grads: list[list[Any]]) -> list[Any]:
    """What the leaves become as a plain list."""
    tx = MADE[name](0.1)
    state = tx.init(leaves)
    update = jax.jit(tx.update)
    for g in grads:
        updates, state = update(g, state, leaves)
        leaves = optax.apply_updates(leaves, updates)
    return leaves


def assert_alike(found: list[Any], expected: list[Any], before: list[Any]) -> None:
    for a, b, first in zip(found, expected, before, strict=True):
        distance = float(jnp.abs(b - first).max())
        assert distance > 0
        assert float(jnp.abs(a - b).max()) <= tolerances.FLOAT32 * distance


@once(0)
@each
def test_linen_parameters_in_a_train_state_step_as_plain_arrays(name: str) -> None:
    linen = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")
    model = linen.Dense(3, bias_init=linen.initializers.ones)
    params = model.init(jax.random.key(0), X)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=MADE[name](0.1))
    state = state.replace(step=jnp.int32(0))

    def loss(params: Any) -> jax.Array:
        return jnp.sum(model.apply({"params": params}, X) ** 2)

    @jax.jit
    def step(state: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss)(state.params)
        return state.apply_gradients(grads=grads), grads

    history = []
    for _ in range(2):
        state, grads = step(state)
        history.append(jax.tree.leaves(grads))
    assert step._cache_size() == 1
    assert state.opt_state.count == 2
    before = jax.tree.leaves(params)
    assert_alike(jax.tree.leaves(state.params), flat_steps(name, before, history), before)


@once(1)
@each
def test_flax_writes_and_reads_the_state(name: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    tx, params = MADE[name](0.1), {"w": jnp.asarray(X), "b": jnp.ones(4, jnp.float32)}
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: jnp.arange(1, 1 + x.size).reshape(x.shape).astype(x.dtype), state)
    again = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()


@once(2)
@each
def test_nnx_optimizer_steps_as_plain_arrays(name: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(4, 3, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, MADE[name](0.1), wrt=nnx.Param)
    before = jax.tree.leaves(nnx.state(model, nnx.Param))

    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        grads = nnx.grad(lambda model: jnp.sum(model(X) ** 2))(model)
        optimizer.update(model, grads)
        return grads

    history = [jax.tree.leaves(step(model, optimizer)) for _ in range(2)]
    assert_alike(jax.tree.leaves(nnx.state(model, nnx.Param)), flat_steps(name, before, history), before)


@once(3)
@each
def test_nnx_state_is_a_tree_as_any_other(name: str) -> None:
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param)
    tx = MADE[name](0.1)
    updates, state = jax.eval_shape(tx.update, params, jax.eval_shape(tx.init, params), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    assert jax.tree.structure(state) == jax.tree.structure(jax.eval_shape(tx.init, params))


@once(4)
@each
def test_equinox_modules_step_as_plain_arrays(name: str) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 3, width_size=5, depth=1, key=jax.random.key(0))
    tx = MADE[name](0.1)
    params = eqx.filter(model, eqx.is_inexact_array)
    state = tx.init(params)
    before = jax.tree.leaves(params)

    @eqx.filter_jit
    def step(model: Any, state: Any) -> tuple[Any, Any, Any]:
        grads = eqx.filter_grad(lambda model: jnp.sum(jax.vmap(model)(X) ** 2))(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, grads

    history = []
    for _ in range(2):
        model, state, grads = step(model, state)
        history.append(jax.tree.leaves(grads))
    after = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    assert_alike(after, flat_steps(name, before, history), before)


def test_names_of_leaves_in_equinox_and_flax_are_paths() -> None:
    eqx, linen = pytest.importorskip("equinox"), pytest.importorskip("flax.linen")
    mlp = eqx.filter(eqx.nn.MLP(4, 3, width_size=5, depth=1, key=jax.random.key(0)), eqx.is_inexact_array)
    dense = linen.Dense(3).init(jax.random.key(0), X)["params"]
    seen: list[str] = []
    solver = lamb(0.1, overrides=[(lambda name, p: bool(seen.append(name)), dict(weight_decay=0.1))])
    for params in (mlp, dense):
        with pytest.warns(UnusedOverrideWarning):
            solver.init(params)
    assert seen == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "bias", "kernel"]


def test_names_of_leaves_in_nnx_end_as_attributes_are_called() -> None:
    nnx = pytest.importorskip("flax.nnx")
    params = nnx.state(nnx.Linear(4, 3, rngs=nnx.Rngs(0)), nnx.Param)
    seen: list[str] = []
    with pytest.warns(UnusedOverrideWarning):
        lamb(0.1, overrides=[(lambda name, p: bool(seen.append(name)), dict(weight_decay=0.1))]).init(params)
    assert seen == ["bias", "kernel"]
