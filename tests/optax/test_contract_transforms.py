"""Transformations of jax around init and update: jit, vmap, donation, derivatives. `thalweg check` has more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import once
from optax_runs import MADE, Tree, each

from thalweg.optax import adafactor, kron, lamb

pytestmark = pytest.mark.slow  # many small programs are compiled

PARAMS = {
    "w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3),
    "b": jnp.zeros(3, jnp.float32),
    "half": jnp.ones(3, jnp.bfloat16),
}


def gradients(params: Tree, step: Any) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + step + 1).astype(p.dtype), params)


def describe(tree: Tree) -> Tree:
    """What decides whether a compiled program serves another call."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree), jax.tree.structure(tree)


@each
def test_states_that_are_made_abstract_or_stepped_need_no_other_program(name: str) -> None:
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    for options in ({}, dict(on_nonfinite="skip"), dict(state_dtype="bfloat16")):
        for lr in (0.1, optax.linear_schedule(0.1, 0.0, 10)):
            tx = MADE[name](lr, **options)
            state = tx.init(PARAMS)
            for other in (jax.eval_shape(tx.init, PARAMS), jax.eval_shape(tx.init, structs), tx.init(structs)):
                assert describe(other) == describe(state)
            assert describe(jax.eval_shape(tx.update, PARAMS, state, PARAMS)[1]) == describe(state)


@once(7)
@each
def test_a_learning_rate_for_each_member_of_an_ensemble(name: str) -> None:
    params = {"w": PARAMS["w"]}

    def one(lr: Any) -> Tree:
        tx = MADE[name](lr)
        return tx.update(gradients(params, 1), tx.init(params), params)[0]["w"]

    together = jax.jit(jax.vmap(one))(jnp.array([0.1, 0.2], jnp.float32))
    for found, expected in ((together[1], 2 * together[0]), (together[0], jax.jit(one)(0.1))):
        assert float(jnp.abs(found - expected).max()) <= tolerances.SPACE["float32"] * float(jnp.abs(expected).max())


@once(8)
@each
def test_donated_buffers_are_all_used_by_one_program(name: str) -> None:
    tx = MADE[name](0.1)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Any, number: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(gradients(params, number), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), jax.devices()[0])  # committed, which state is not
    state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(3):
            given = jax.tree.leaves((params, state))
            params, state = step(params, state, jnp.int32(number))
            assert all(x.is_deleted() for x in given)
    assert step._cache_size() == 1


@each
def test_the_first_state_shares_no_memory_with_parameters_or_within_itself(name: str) -> None:
    state = jax.tree.leaves(MADE[name](0.1).init(PARAMS))
    places = [x.unsafe_buffer_pointer() for x in (*jax.tree.leaves(PARAMS), *state) if x.size]
    assert len(set(places)) == len(places)


@each
def test_programs_call_nothing_on_the_host_and_promote_nothing(name: str) -> None:
    for options in ({}, dict(on_nonfinite="skip", max_grad_norm=1.0)):
        tx = MADE[name](0.1, **options)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            program, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(PARAMS, tx.init(PARAMS), PARAMS)
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, PARAMS)
        assert "callback" not in str(program)
        assert "sqrt" in str(program)


@once(12)
@each
def test_ordinary_input_makes_no_nan_anywhere_inside_and_leaks_no_tracer(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.debug_nans(True), jax.checking_leaks():
        update = jax.jit(tx.update)
        state = jax.jit(tx.init)(params)
        for grads in (zeros, gradients(params, 1), zeros):
            updates, state = update(grads, state, params)
    assert (state.count, state.skipped) == (3, 0)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


def test_a_transformation_can_be_a_static_argument() -> None:
    tx, traces = lamb(0.1), []

    def step(tx: Any, state: Any) -> Any:
        traces.append(1)
        return tx.update(PARAMS, state, PARAMS)[1]

    compiled = jax.jit(step, static_argnums=0)
    assert compiled(tx, compiled(tx, tx.init(PARAMS))).count == 2
    assert len(traces) == 1


# ---- derivatives of whole training runs

WIDE = {"w": np.cos(np.arange(12.0)).reshape(4, 3), "b": np.zeros(3)}
X = np.sin(np.arange(20.0)).reshape(5, 4)
SMOOTH = {**MADE, "adafactor": partial(adafactor, min_dim_size_to_factor=3), "lamb": lamb, "kron": kron}
each_smooth = pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])


def outcome(name: str, lr: Any, params: Tree, *, steps: int = 2, **options: Any) -> jax.Array:
    """The loss after some steps of training."""
    tx = SMOOTH[name](lr, **options)

    def loss(params: Tree) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.asarray(X) @ params["w"] + params["b"]) - 0.3) ** 2)

    state = tx.init(params)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return loss(params)


def assert_near(found: Any, f: Callable[[float], Any], least: float = 0.0, times: float = 1.0) -> None:
    """Beside central differences, which are larger than the least."""
    h = 1e-5
    expected = (float(f(h)) - float(f(-h))) / (2 * h)
    assert abs(expected) > least
    assert abs(float(found) - expected) <= times * tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


@pytest.mark.nightly
@each
def test_derivatives_by_learning_rate_and_parameters_are_those_of_finite_differences(name: str) -> None:
    f, least = jax.jit(partial(outcome, name)), 100 * tolerances.FINITE_DIFFERENCES
    by_lr, by_params = jax.jit(jax.grad(partial(outcome, name), argnums=(0, 1)))(0.1, WIDE)
    assert all(jnp.isfinite(x).all() for x in (by_lr, *by_params.values()))
    assert_near(by_lr, lambda h: f(0.1 + h, WIDE), least)
    # the bias stays at zero, where norms have no slope
    direction = np.cos(3 * WIDE["w"])
    along = jnp.sum(by_params["w"] * direction)
    assert_near(along, lambda h: f(0.1, {**WIDE, "w": WIDE["w"] + h * direction}), least)


@pytest.mark.nightly
@each_smooth
def test_forward_and_reverse_derivatives_agree(name: str) -> None:
    forward = jax.jit(jax.jacfwd(partial(outcome, name)))(0.1, WIDE)
    reverse = jax.jit(jax.jacrev(partial(outcome, name)))(0.1, WIDE)
    assert forward != 0
    assert abs(forward - reverse) <= tolerances.FLOAT64 * abs(reverse)


@pytest.mark.nightly
@each_smooth
def test_second_derivatives_are_finite_beside_a_bias_of_zero(name: str) -> None:
    slope = jax.grad(partial(outcome, name), argnums=(0, 1))
    f = jax.jit(slope)
    second = jax.jit(jax.jacrev(slope))(0.1, WIDE)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(second))
    assert_near(second[0], lambda h: f(0.1 + h, WIDE)[0], times=10)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("lamb", "b1", 0.8), ("lamb", "weight_decay", 0.1), ("lars", "momentum", 0.5), ("adafactor", "decay_rate", 0.7)],
)
def test_derivatives_by_options_are_those_of_finite_differences(name: str, option: str, value: float) -> None:
    def at(x: Any) -> jax.Array:
        return outcome(name, 0.1, WIDE, steps=3, **{option: x})

    f, found = jax.jit(at), jax.jit(jax.grad(at))(value)
    assert found != 0
    assert_near(found, lambda h: f(value + h))


@pytest.mark.nightly
@each_smooth
def test_a_gradient_of_zero_has_finite_derivatives(name: str) -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}

    def step(params: Tree, grads: Tree) -> jax.Array:
        tx = SMOOTH[name](0.1)
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(x) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

    slopes = jax.jit(jax.grad(step, argnums=(0, 1)))(params, jax.tree.map(jnp.zeros_like, params))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slopes))
