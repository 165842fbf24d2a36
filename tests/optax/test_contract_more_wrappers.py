"""More wrappers: those of optax.contrib, flattening, and functions over states."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import once
from optax_runs import GRADS, MADE, PARAMS, Tree, each, run

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.nightly  # many small programs are compiled


def loss(params: Tree) -> jax.Array:
    return sum(jnp.sum((p - 0.25) ** 2) for p in jax.tree.leaves(params))


def descends(tx: Any, steps: int = 15, **extra: Any) -> Tree:
    """Parameters after some steps on a bowl, which must bring the loss down; one program for all steps."""
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params: Tree, state: Any) -> tuple[Tree, Any]:
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, **dict.fromkeys(extra, value))
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    assert step._cache_size() == 1
    assert loss(params) < 0.9 * loss(PARAMS)
    return params


def assert_alike(found: Tree, expected: Tree, before: Tree = PARAMS) -> None:
    for a, b, first in zip(*map(jax.tree.leaves, (found, expected, before)), strict=True):
        distance = float(jnp.abs(b - first).max())
        assert distance > 0
        assert float(jnp.abs(a - b).max()) <= tolerances.FLOAT32 * distance


@once(0)
@each
def test_schedule_free_descends(name: str) -> None:
    descends(optax.contrib.schedule_free(MADE[name](0.1), learning_rate=0.1, b1=0.9))


@once(1)
@each
def test_mechanic_descends(name: str) -> None:
    descends(optax.contrib.mechanize(MADE[name](0.1), s_init=1e-2), steps=40)


@once(2)
@each
def test_sharpness_aware_minimization_descends(name: str) -> None:
    sam = optax.contrib.sam(MADE[name](0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    descends(sam, steps=20)


def test_the_adversary_of_sharpness_aware_minimization_may_be_one_of_ours() -> None:
    descends(optax.contrib.sam(optax.sgd(0.1), lars(0.05), sync_period=2))


@once(3)
@each
def test_reducing_on_a_plateau_scales_what_comes_before(name: str) -> None:
    tx = optax.chain(MADE[name](0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=3))
    found, _ = run(tx, steps=1, value=jnp.float32(1.0))
    assert_alike(found, run(MADE[name](0.1), steps=1)[0])
    descends(tx, value=True)


@once(4)
@each
def test_complex_parameters_are_served_as_pairs(name: str) -> None:
    w = PARAMS["w"]
    params, grads = {"z": w + 1j * (w + 1)}, {"z": jnp.sin(w) + 1j * jnp.cos(w)}
    found, _ = run(optax.contrib.split_real_and_imaginary(MADE[name](0.1)), params, grads)
    parts, _ = run(MADE[name](0.1), {"re": w, "im": w + 1}, {"re": jnp.sin(w), "im": jnp.cos(w)})
    assert found["z"].dtype == jnp.complex64
    assert_alike((found["z"].real, found["z"].imag), (parts["re"], parts["im"]), (w, w + 1))


@once(5)
@each
def test_a_flattened_tree_steps_as_one_vector(name: str) -> None:
    found, _ = run(optax.flatten(MADE[name](0.1)))
    vector = jnp.concatenate([x.ravel() for x in jax.tree.leaves(PARAMS)])
    expected, _ = run(MADE[name](0.1), vector, jnp.concatenate([x.ravel() for x in jax.tree.leaves(GRADS)]))
    assert_alike(jnp.concatenate([x.ravel() for x in jax.tree.leaves(found)]), expected, vector)


def test_a_linesearch_after_an_optimizer_descends() -> None:
    tx = optax.chain(lamb(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=10))
    params, state = PARAMS, tx.init(PARAMS)
    value, grads = jax.value_and_grad(loss)(params)
    updates, _ = jax.jit(partial(tx.update, value_fn=loss))(grads, state, params, value=value, grad=grads)
    assert loss(optax.apply_updates(params, updates)) < value


def test_other_wrappers_pass_parameters_and_extra_arguments_on() -> None:
    plain, _ = run(lamb(0.1))
    always = optax.conditionally_transform(lamb(0.1), should_transform_fn=lambda count, **_: count >= 0)
    for tx in (always, optax.named_chain(("solver", lamb(0.1)), ("same", optax.identity()))):
        assert_alike(run(tx, value=1.0)[0], plain)
    frozen = optax.chain(lamb(0.1), optax.keep_params_nonnegative())
    assert min(float(x.min()) for x in jax.tree.leaves(run(frozen, jax.tree.map(jnp.abs, PARAMS))[0])) >= 0
    frozen, _ = run(optax.selective_transform(lamb(0.1), freeze_mask={"w": False, "b": True}))
    assert_alike({"w": frozen["w"]}, {"w": plain["w"]}, {"w": PARAMS["w"]})
    assert (frozen["b"] == PARAMS["b"]).all()


# ---- functions over states


@once(6)
@each
def test_mapping_over_the_parameters_of_a_state_reaches_all_but_the_counts(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    state = tx.init(PARAMS)
    for function in (optax.tree_map_params, optax.tree.map_params):
        mapped = function(tx, lambda x: x + 7, state, transform_non_params=lambda x: x - 1)
        assert (mapped.count, mapped.skipped) == (-1, -1)
        for field in set(state._fields) - {"count", "skipped"}:
            own, old = jax.tree.leaves(getattr(mapped, field)), jax.tree.leaves(getattr(state, field))
            assert all((a == b + 7).all() for a, b in zip(own, old, strict=True))


@once(7)
@each
def test_mapping_over_a_state_beside_trees_like_the_parameters(name: str) -> None:
    tx = MADE[name](0.1)
    state = tx.init(PARAMS)
    names = {"w": "weight", "b": "bias"}
    # where a parameter has no entry, or several, the state has None, or a tuple
    own = dict(is_leaf=lambda x: x is None or isinstance(x, tuple)) if name in ("adafactor", "kron") else {}
    mapped = optax.tree_map_params(tx, lambda x, name: (name, getattr(x, "shape", ())), state, names, **own)
    assert mapped.count == 0
    momentum = {"adafactor": "exp_avg", "lamb": "exp_avg", "lars": "momentum_buffer", "kron": "momentum_buffer"}[name]
    assert getattr(mapped, momentum) == {"w": ("weight", (4, 3)), "b": ("bias", (3,))}


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lamb, dict(mask={"w": True, "b": False}, weight_decay=0.1)),
        (lamb, dict(stacked_axes={"w": 1, "b": 0})),
        (lars, dict(trust_ratio_mask={"w": True, "b": False})),
        (adafactor, dict(weight_decay_mask={"w": True, "b": False}, weight_decay_rate=0.1)),
        (kron, dict(weight_decay_mask={"w": True, "b": False}, weight_decay=0.1)),
        (lamb, dict(mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params), weight_decay=0.1)),
        (lamb, dict(overrides=[("b", dict(weight_decay=0.1))])),
    ],
)
def test_mapping_over_a_state_goes_with_options_by_leaf(factory: Any, options: dict[str, Any]) -> None:
    tx = factory(0.1, **options)
    mapped = optax.tree_map_params(tx, lambda x: x + 7, tx.init(PARAMS))
    assert mapped.count == 0
    assert all((x >= 7).all() for x in jax.tree.leaves(mapped._replace(count=None)))


@once(8)
@each
def test_counts_and_statistics_are_found_by_name(name: str) -> None:
    tx = optax.chain(optax.clip(1.0), MADE[name](0.1))
    state = tx.init(PARAMS)
    assert optax.tree.get(state, "count") == 0
    later = optax.tree.set(state, count=jnp.int32(5))
    assert jax.eval_shape(tx.update, GRADS, later, PARAMS)[1][1].count.dtype == jnp.int32
    assert optax.tree.get(later, "count") == 5
    field = {"lamb": "exp_avg_sq", "adafactor": "variance", "lars": "momentum_buffer", "kron": "Q"}[name]
    assert set(optax.tree.get(state, field)) == {"w", "b"}


@once(9)
@each
def test_states_can_be_pickled(name: str) -> None:
    state = MADE[name](0.1).init(PARAMS)
    again = pickle.loads(pickle.dumps(state))
    assert type(again) is type(state)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
