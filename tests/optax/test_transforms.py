"""Transformations of jax around init and update: jit, vmap, donation, derivatives. `thalweg check` has more."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import MADE, SOON, Tree, every_function

from thalweg.optax import adafactor, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

PARAMS = {
    "w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3),
    "b": jnp.zeros(3, jnp.float32),
    "half": jnp.ones(3, jnp.bfloat16),
}


def gradients(params: Tree, step: Any) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + step + 1).astype(p.dtype), params)


@every_function
def test_donated_buffers_are_all_used_by_one_program(name: str) -> None:
    tx = MADE[name](0.1)

    @partial(jax.jit, donate_argnums=(0, 1), compiler_options=SOON)
    def step(params: Tree, state: Any, number: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(gradients(params, number), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), jax.devices()[0])  # committed, which state is not
    state = tx.init(params)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(set(places)) == len(places), "the first state shares memory"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            given = jax.tree.leaves((params, state))
            params, state = step(params, state, jnp.int32(number))
            assert all(x.is_deleted() for x in given)
    assert step._cache_size() == 1


@every_function
def test_programs_call_nothing_on_the_host_and_promote_nothing(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        program, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, PARAMS)
    assert "callback" not in str(program)
    assert "sqrt" in str(program)


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
SMOOTH: dict[str, Any] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3),
    "lamb": lamb,
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": MADE["kron"],
}


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


def assert_slope(found: Any, f: Any, times: float = 1.0) -> None:
    """Beside central differences."""
    h = 1e-5
    expected = (float(f(h)) - float(f(-h))) / (2 * h)
    assert expected != 0
    assert abs(float(found) - expected) <= times * tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_by_learning_rate_and_parameters_are_those_of_finite_differences(name: str) -> None:
    f = jax.jit(partial(outcome, name), compiler_options=SOON)
    slope = jax.jit(jax.grad(partial(outcome, name), argnums=(0, 1)), compiler_options=SOON)
    by_lr, by_params = slope(0.1, WIDE)
    assert all(jnp.isfinite(x).all() for x in (by_lr, *by_params.values()))
    assert_slope(by_lr, lambda h: f(0.1 + h, WIDE))
    # the bias stays at zero, where norms have no slope
    direction = np.cos(3 * WIDE["w"])
    assert_slope(jnp.sum(by_params["w"] * direction), lambda h: f(0.1, {**WIDE, "w": WIDE["w"] + h * direction}))


def test_forward_and_second_derivatives_are_those_of_the_reverse_ones() -> None:
    slope = jax.grad(partial(outcome, "lars"), argnums=(0, 1))
    f = jax.jit(slope, compiler_options=SOON)
    forward = jax.jit(jax.jacfwd(partial(outcome, "lars")), compiler_options=SOON)(0.1, WIDE)
    assert abs(forward - f(0.1, WIDE)[0]) <= tolerances.FLOAT64 * abs(forward)
    second = jax.jit(jax.jacrev(slope), compiler_options=SOON)(0.1, WIDE)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(second))
    assert_slope(second[0], lambda h: f(0.1 + h, WIDE)[0], times=10)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("lamb", "b1", 0.8), ("lamb", "weight_decay", 0.1), ("lars", "momentum", 0.5), ("adafactor", "decay_rate", 0.7)],
)
def test_derivatives_by_options_are_those_of_finite_differences(name: str, option: str, value: float) -> None:
    def at(x: Any) -> jax.Array:
        return outcome(name, 0.1, WIDE, steps=3, **{option: x})

    f = jax.jit(at, compiler_options=SOON)
    assert_slope(jax.jit(jax.grad(at), compiler_options=SOON)(value), lambda h: f(value + h))


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_a_gradient_of_zero_has_finite_derivatives(name: str) -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}

    def step(params: Tree, grads: Tree) -> jax.Array:
        tx = SMOOTH[name](0.1)
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(x) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

    slope = jax.jit(jax.grad(step, argnums=(0, 1)), compiler_options=SOON)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slope(params, jax.tree.map(jnp.zeros_like, params))))
