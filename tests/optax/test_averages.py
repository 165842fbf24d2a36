"""Averages of weights: of what was applied, whatever follows the rule in a chain."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thalweg import OptionError
from thalweg.optax import adamw, averaged, mixture, muon, sgd

AVERAGED: Any = dict(averaged=0.9)
START = np.array([3.0, -2.0])


def make(lr: float = 1.0) -> Any:
    return sgd(lr, **AVERAGED)


#: A solver, and how many gradients it takes for a step.
CHAINS: dict[str, tuple[Any, int]] = {
    "alone": (make(0.1), 1),
    "scale": (optax.chain(make(), optax.scale(0.1)), 1),
    "schedule": (optax.chain(make(), optax.scale_by_schedule(optax.linear_schedule(0.2, 0.05, 20))), 1),
    "masked": (optax.chain(optax.masked(make(), {"w": True}), optax.scale(0.1)), 1),
    "finite": (optax.apply_if_finite(optax.chain(make(), optax.scale(0.1)), 3), 1),
    "partition": (optax.chain(optax.partition({"all": make()}, {"w": "all"}), optax.scale(0.1)), 1),
    "MultiSteps": (optax.MultiSteps(optax.chain(make(), optax.scale(0.1)), 2), 2),
}


def train(solver: Any, steps: int, slope: Any) -> tuple[Any, Any, list[Any]]:
    """The parameters, the state, and the weights after each step."""
    params: Any = {"w": jnp.asarray(START)}
    state, update, after = solver.init(params), jax.jit(solver.update), []
    for step in range(steps):
        updates, state = update({"w": slope(params["w"], step)}, state, params)
        params = optax.apply_updates(params, updates)
        after.append(np.asarray(params["w"]))
    return params, state, after


@pytest.mark.parametrize("chain", CHAINS)
def test_an_average_is_of_what_a_chain_applies(chain: str) -> None:
    """Also where gradients are zero, and it goes on to the weights."""
    (solver, every), wanted = CHAINS[chain], START
    params, state, after = train(solver, 12, lambda w, step: (w - 1.0) * (step < 8))
    for p in after[every - 1 :: every]:
        wanted = 0.9 * wanted + 0.1 * p
    assert np.allclose(averaged(solver, state, params)["w"], wanted, rtol=1e-12)


def test_schedule_free_evaluates_an_average_of_what_a_chain_applies() -> None:
    """The rule steps z by what it takes y to be: x stays among the points that were trained at, and is no worse."""
    solver = optax.chain(sgd(1.0, schedule_free=0.9), optax.scale(0.1))
    params, state, _ = train(solver, 200, lambda w, step: w - 1.0)
    assert np.abs(np.asarray(averaged(solver, state, params)["w"]) - 1.0).max() < 0.3


def test_averages_of_a_mixture() -> None:
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    solver = mixture([("w", adamw(0.1, averaged=0.5)), ("*", sgd(0.1))])
    updates, state = solver.update(params, solver.init(params), params)
    after = jax.tree.map(jnp.add, params, updates)
    found = averaged(solver, state, after)
    assert np.allclose(found["w"], (params["w"] + after["w"]) / 2)
    assert np.array_equal(found["b"], after["b"])
    plain = sgd(0.1)
    with pytest.raises(OptionError, match="no parameter has an average"):
        averaged(plain, plain.init(params), params)


def test_what_is_around_muon_is_around_it_with_a_layout() -> None:
    """A rule that is made of another for the axes of a leaf has the same around it."""
    rng = np.random.default_rng(0)
    params, grads = ({"dense": {"kernel": jnp.asarray(rng.normal(size=(6, 4)), jnp.float32)}} for _ in range(2))
    moved = []
    for options in ({}, dict(cautious=True)):
        solver = muon(0.1, layout="flax", **options)
        updates, _ = solver.update(grads, solver.init(params), params)
        moved.append(np.asarray(updates["dense"]["kernel"]))
    agrees = moved[0] * np.asarray(grads["dense"]["kernel"]) < 0
    assert 0 < agrees.mean() < 1
    assert np.allclose(moved[1], moved[0] * agrees / agrees.mean(), rtol=1e-5)
    assert np.array_equal(moved[1] != 0, agrees)
