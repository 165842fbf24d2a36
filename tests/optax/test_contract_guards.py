"""Steps that are not finite, clipping of all gradients together, and climbing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tolerances
from lanes import by_turns, once
from optax_runs import GRADS, MADE, PARAMS, Tree, each

from thalweg.optax import lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled


def equal(a: Tree, b: Tree) -> bool:
    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def assert_alike(found: Tree, expected: Tree) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(b).max()) > 0
        assert float(jnp.abs(a - b).max()) <= tolerances.FLOAT32 * float(jnp.abs(b).max())


@once(0)
@each
def test_one_bad_element_leaves_all_parameters_state_and_count_as_they_were(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    update = jax.jit(tx.update)
    _, state = update(GRADS, tx.init(PARAMS), PARAMS)
    assert (state.count, state.skipped) == (1, 0)
    assert state.skipped.dtype == jnp.int32
    for number, bad in enumerate((jnp.nan, jnp.inf, -jnp.inf), start=1):
        for key, place in (("w", (1, 2)), ("b", (0,))):
            before = state
            updates, state = update({**GRADS, key: GRADS[key].at[place].set(bad)}, state, PARAMS)
            assert all((x == 0).all() for x in jax.tree.leaves(updates))
            assert equal(state._replace(skipped=None), before._replace(skipped=None))
        assert (state.count, state.skipped) == (1, 2 * number)
    updates, state = update(GRADS, state, PARAMS)
    plain = MADE[name](0.1)
    step = jax.jit(plain.update)
    _, unguarded = step(GRADS, plain.init(PARAMS), PARAMS)
    expected, unguarded = step(GRADS, unguarded, PARAMS)
    assert_alike(updates, expected)
    assert (state.count, state.skipped) == (2, 6)
    assert update._cache_size() == 1


@once(1)
@each
def test_without_a_guard_what_is_not_finite_goes_through_and_there_is_no_count_of_it(name: str) -> None:
    tx = MADE[name](0.1)
    state = tx.init(PARAMS)
    assert state.skipped is None
    updates, state = jax.jit(tx.update)({**GRADS, "w": GRADS["w"].at[0, 0].set(jnp.nan)}, state, PARAMS)
    assert jnp.isnan(updates["w"]).any()
    assert jnp.isfinite(updates["b"]).all()
    assert state.count == 1


@once(2)
@each
def test_a_float16_parameter_that_would_overflow_is_not_finite(name: str) -> None:
    params, grads = {"w": jnp.full((4, 3), 60000.0, jnp.float16)}, {"w": jnp.full((4, 3), -1.0, jnp.float16)}
    tx = MADE[name](1e6, on_nonfinite="skip")
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert (state.count, state.skipped) == (0, 1)
    assert (updates["w"] == 0).all()


@by_turns("limit", first=3)
@each
@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_by_the_joint_norm_is_that_of_optax_before(name: str, limit: float) -> None:
    ours, theirs = MADE[name](0.1, max_grad_norm=limit), optax.chain(optax.clip_by_global_norm(limit), MADE[name](0.1))
    found, own = jax.jit(ours.update)(GRADS, ours.init(PARAMS), PARAMS)
    expected, other = jax.jit(theirs.update)(GRADS, theirs.init(PARAMS), PARAMS)
    assert_alike(found, expected)
    field = "exp_avg" if name in ("lamb", "adafactor") else "momentum_buffer"
    assert_alike(*[optax.tree.get(state, field) for state in (own, other)])
    assert (optax.tree.norm(GRADS) > limit) == (limit < 1)


@once(4)
@each
def test_clipping_a_gradient_of_zero_and_one_that_is_not_finite(name: str) -> None:
    tx = MADE[name](0.1, max_grad_norm=1.0, on_nonfinite="skip")
    update, zeros = jax.jit(tx.update), jax.tree.map(jnp.zeros_like, GRADS)
    updates, state = update(zeros, tx.init(PARAMS), PARAMS)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state)))
    updates, state = update({**GRADS, "b": GRADS["b"].at[0].set(jnp.inf)}, state, PARAMS)
    assert (state.count, state.skipped) == (1, 1)


@pytest.mark.parametrize("limit", [jnp.array(0.5), jnp.float32(0.5)])
def test_the_limit_of_the_joint_norm_may_be_an_array(limit: Any) -> None:
    found, expected = lamb(0.1, eps=0.1, max_grad_norm=limit), lamb(0.1, eps=0.1, max_grad_norm=0.5)
    assert_alike(
        jax.jit(found.update)(GRADS, found.init(PARAMS), PARAMS)[0],
        jax.jit(expected.update)(GRADS, expected.init(PARAMS), PARAMS)[0],
    )


def test_gradients_of_float16_do_not_overflow_the_joint_norm() -> None:
    params = {"w": jnp.ones(1000, jnp.float16)}
    tx = lars(0.1, trust=False, max_grad_norm=1.0)
    updates, _ = jax.jit(tx.update)({"w": jnp.full(1000, 1000.0, jnp.float16)}, tx.init(params), params)
    assert abs(float(optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), updates))) - 0.1) < 0.1 * (
        tolerances.ROUNDED_STEP
    )


@once(5)
@each
def test_climbing_is_descending_along_the_opposite_gradient(name: str) -> None:
    up, down = MADE[name](0.1, maximize=True), MADE[name](0.1)
    opposite = jax.tree.map(jnp.negative, GRADS)
    climbed, _ = jax.jit(up.update)(GRADS, up.init(PARAMS), PARAMS)
    descended, _ = jax.jit(down.update)(opposite, down.init(PARAMS), PARAMS)
    assert_alike(climbed, descended)
    assert jnp.sum(climbed["b"] * GRADS["b"]) > 0
