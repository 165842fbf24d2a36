"""Derivatives of whole training runs, with respect to parameters and options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import once, one_in

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.nightly  # many small programs are compiled

Tree = Any
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3),
    "lamb": lamb,
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": kron,
}
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name == "kron" else ()) for name in MADE]
)
PARAMS = {"w": np.cos(np.arange(12.0)).reshape(4, 3), "b": np.zeros(3)}
X = np.sin(np.arange(20.0)).reshape(5, 4)


def loss(params: Tree) -> jax.Array:
    return jnp.mean((jnp.tanh(jnp.asarray(X) @ params["w"] + params["b"]) - 0.3) ** 2)


def outcome(
    name: str, lr: Any, params: Tree, *, steps: int = 2, around: Callable[..., Any] = lambda f: f, **options: Any
) -> jax.Array:
    """The loss after some steps of training."""
    tx = MADE[name](lr, **options)

    @around
    def step(params: Tree, state: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return loss(params)


def central(f: Callable[[float], Any], h: float = 1e-5) -> float:
    return (float(f(h)) - float(f(-h))) / (2 * h)


def assert_near(found: Any, expected: float) -> None:
    assert abs(expected) > 100 * tolerances.FINITE_DIFFERENCES
    assert abs(float(found) - expected) <= tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


@once(0)
@each
def test_derivatives_by_learning_rate_and_parameters_are_those_of_finite_differences(name: str) -> None:
    f = jax.jit(partial(outcome, name))
    by_lr, by_params = jax.jit(jax.grad(partial(outcome, name), argnums=(0, 1)))(0.1, PARAMS)
    assert all(jnp.isfinite(x).all() for x in (by_lr, *by_params.values()))
    assert_near(by_lr, central(lambda h: f(0.1 + h, PARAMS)))
    # the bias stays at zero, where norms have no slope
    direction = np.cos(3 * PARAMS["w"])
    along = central(lambda h: f(0.1, {**PARAMS, "w": PARAMS["w"] + h * direction}))
    assert_near(jnp.sum(by_params["w"] * direction), along)


@once(1)
@each
def test_checkpointing_steps_changes_no_derivative(name: str) -> None:
    plain = jax.jit(jax.grad(partial(outcome, name)))(0.1, PARAMS)
    kept = jax.jit(jax.grad(partial(outcome, name, around=jax.checkpoint)))(0.1, PARAMS)
    assert plain != 0
    assert abs(plain - kept) <= tolerances.FLOAT64 * abs(plain)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_forward_and_reverse_derivatives_agree(name: str) -> None:
    forward = jax.jit(jax.jacfwd(partial(outcome, name)))(0.1, PARAMS)
    reverse = jax.jit(jax.jacrev(partial(outcome, name)))(0.1, PARAMS)
    assert forward != 0
    assert abs(forward - reverse) <= tolerances.FLOAT64 * abs(reverse)


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_second_derivatives_are_finite_beside_a_bias_of_zero(name: str) -> None:
    slope = jax.grad(partial(outcome, name), argnums=(0, 1))
    f = jax.jit(slope)
    second = jax.jit(jax.jacrev(slope))(0.1, PARAMS)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(second))
    expected = central(lambda h: f(0.1 + h, PARAMS)[0])
    assert abs(second[0] - expected) <= 10 * tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


@pytest.mark.parametrize(
    ("name", "option", "value"),
    one_in(
        2,
        [
            ("lamb", "b1", 0.8),
            ("lamb", "weight_decay", 0.1),
            ("lars", "momentum", 0.5),
            ("adafactor", "decay_rate", 0.7),
        ],
    ),
)
def test_derivatives_by_options_are_those_of_finite_differences(name: str, option: str, value: float) -> None:
    def at(x: Any) -> jax.Array:
        return outcome(name, 0.1, PARAMS, steps=3, **{option: x})

    f = jax.jit(at)
    found, expected = jax.jit(jax.grad(at))(value), central(lambda h: f(value + h))
    assert found != 0
    assert abs(found - expected) <= tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


def test_a_gradient_of_zero_has_finite_derivatives() -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    zeros = jax.tree.map(jnp.zeros_like, params)
    for name in ("adafactor", "lamb", "lars"):

        def step(params: Tree, grads: Tree, name: str = name) -> jax.Array:
            tx = MADE[name](0.1)
            updates, _ = tx.update(grads, tx.init(params), params)
            return sum(jnp.sum(x) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

        slopes = jax.jit(jax.grad(step, argnums=(0, 1)))(params, zeros)
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slopes)), name
