"""Steps that are not finite, clipping of all gradients together, and climbing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
import tolerances
from lanes import by_turns, once
from optax_runs import GRADS, MADE, PARAMS, Tree, each

from thalweg.optax import lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled


def take_step(tx: optax.GradientTransformation, grads: Tree = GRADS, params: Tree = PARAMS) -> tuple[Tree, Tree]:
    """Updates and state of a first step."""
    return jax.jit(tx.update)(grads, tx.init(params), params)


def assert_alike(found: Tree, expected: Tree) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert float(jnp.abs(b).max()) > 0
        assert float(jnp.abs(a - b).max()) <= tolerances.FLOAT32 * float(jnp.abs(b).max())


@once(0)
@each
def test_one_bad_element_leaves_all_parameters_state_and_count_as_they_were(name: str) -> None:
    """Also where gradients are clipped, of zero too."""
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=100.0)
    update = jax.jit(tx.update)
    _, state = update(jax.tree.map(jnp.zeros_like, GRADS), tx.init(PARAMS), PARAMS)
    assert (state.count, state.skipped) == (1, 0)
    assert state.skipped.dtype == jnp.int32
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))
    first = state
    for number, bad in enumerate((jnp.nan, jnp.inf, -jnp.inf), start=1):
        for key, place in (("w", (1, 2)), ("b", (0,))):
            updates, state = update({**GRADS, key: GRADS[key].at[place].set(bad)}, state, PARAMS)
            assert all((x == 0).all() for x in jax.tree.leaves(updates))
        assert (state.count, state.skipped) == (1, 2 * number)
    kept, before = (jax.tree.leaves(own._replace(skipped=None)) for own in (state, first))
    assert all((a == b).all() for a, b in zip(kept, before, strict=True))
    found, state = update(GRADS, state, PARAMS)
    expected, _ = update(GRADS, first, PARAMS)
    assert_alike(found, expected)
    assert (state.count, state.skipped) == (2, 6)
    assert update._cache_size() == 1


@once(1)
@each
def test_without_a_guard_what_is_not_finite_goes_through_and_there_is_no_count_of_it(name: str) -> None:
    updates, state = take_step(MADE[name](0.1), {**GRADS, "w": GRADS["w"].at[0, 0].set(jnp.nan)})
    assert jnp.isnan(updates["w"]).any()
    assert jnp.isfinite(updates["b"]).all()
    assert (state.count, state.skipped) == (1, None)


@once(2)
@each
def test_a_float16_parameter_that_would_overflow_is_not_finite(name: str) -> None:
    params, grads = {"w": jnp.full((4, 3), 60000.0, jnp.float16)}, {"w": jnp.full((4, 3), -1.0, jnp.float16)}
    updates, state = take_step(MADE[name](1e6, on_nonfinite="skip"), grads, params)
    assert (state.count, state.skipped) == (0, 1)
    assert (updates["w"] == 0).all()


@by_turns("limit", first=3)
@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor", "kron"])
@pytest.mark.parametrize("limit", [0.5, pytest.param(100.0, marks=pytest.mark.nightly)])
def test_clipping_by_the_joint_norm_is_that_of_optax_before(name: str, limit: float) -> None:
    found, own = take_step(MADE[name](0.1, max_grad_norm=limit))
    expected, other = take_step(optax.chain(optax.clip_by_global_norm(limit), MADE[name](0.1)))
    assert_alike(found, expected)
    field = "exp_avg" if name in ("lamb", "adafactor") else "momentum_buffer"
    assert_alike(*[optax.tree.get(state, field) for state in (own, other)])
    assert (optax.tree.norm(GRADS) > limit) == (limit < 1)


def test_the_limit_of_the_joint_norm_may_be_an_array() -> None:
    found, _ = take_step(lamb(0.1, eps=0.1, max_grad_norm=jnp.array(0.5)))
    assert_alike(found, take_step(lamb(0.1, eps=0.1, max_grad_norm=0.5))[0])


def test_gradients_of_float16_do_not_overflow_the_joint_norm() -> None:
    params = {"w": jnp.ones(1000, jnp.float16)}
    grads = {"w": jnp.full(1000, 1000.0, jnp.float16)}
    updates, _ = take_step(lars(0.1, trust=False, max_grad_norm=1.0), grads, params)
    norm = float(jnp.linalg.norm(updates["w"].astype(jnp.float32)))
    assert abs(norm - 0.1) < 0.1 * tolerances.ROUNDED_STEP


@once(5)
@each
def test_climbing_is_descending_along_the_opposite_gradient(name: str) -> None:
    climbed, _ = take_step(MADE[name](0.1, maximize=True))
    descended, _ = take_step(MADE[name](0.1), jax.tree.map(jnp.negative, GRADS))
    assert_alike(climbed, descended)
    assert jnp.sum(climbed["b"] * GRADS["b"]) > 0
