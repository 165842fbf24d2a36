"""What is around a rule, in JAX: equal to plain loops in float64; averages of a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from composed import RULES, STEPS, Damped, case_of, damped, draw, pairs, take_steps
from tolerances import FLOAT64

import thalweg.optax
from thalweg import OptionError
from thalweg.rules import around

#: In the ordinary lane.
DAY = {("AdamW", "averaged"), ("Adafactor", "schedule-free"), ("Muon", "both")}
CASES = [pytest.param(*pair, marks=() if pair in DAY else pytest.mark.nightly) for pair in pairs()]


def error(found: Any, wanted: Any) -> float:
    return float(np.max(np.abs(np.asarray(found) - wanted)) / np.max(np.abs(wanted - draw(0))))


def train(solver: Any, *, applied: bool) -> tuple[Any, Any]:
    params: Any = {"a": jnp.asarray(draw(0)), "b": jnp.asarray(draw(0))}  # which go as one stack
    state, step, update = solver.init(params), jax.jit(thalweg.optax.make_step(solver)), jax.jit(solver.update)
    for t in range(1, STEPS + 1):
        grads = {"a": draw(t), "b": draw(t)}
        if applied:
            params, state = step(params, state, grads)
        else:
            updates, state = update(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
    return params, state


@pytest.mark.parametrize(("name", "what"), CASES)
def test_it_is_a_plain_loop(name: str, what: str) -> None:
    rule, lr, options, wanted = case_of(name, what)
    with jax.enable_x64(True):
        solver = thalweg.optax.transformation(type(rule), lr, **options)
        for applied in (False, True):
            params, state = train(solver, applied=applied)
            assert all(error(p, wanted["p"]) < FLOAT64 for p in params.values())
        if evaluated := wanted.keys() & {"average", "x"}:
            found = thalweg.optax.averaged(solver, state, params)
            assert error(found["a"], wanted[evaluated.pop()]) < FLOAT64


@pytest.mark.parametrize("name", ["AdamW", pytest.param("Muon", marks=pytest.mark.nightly)])
def test_one_of_ones_own(name: str) -> None:
    rule, lr = RULES[name]
    options = {key: value for key, value in vars(rule).items() if value != vars(type(rule)())[key]}
    with jax.enable_x64(True):
        solver = thalweg.optax.transformation(around(type(rule), Damped), lr, memory=0.8, **options)
        params, _ = train(solver, applied=True)
        assert error(params["a"], take_steps(rule, lr, damped(0.8))["p"]) < FLOAT64


def test_muon_with_a_layout_is_not_without_it() -> None:
    """A rule that is made of another for the axes of a leaf has the same around it."""
    params: Any = {"dense": {"kernel": jnp.asarray(draw(0), jnp.float32)}}
    grads: Any = {"dense": {"kernel": jnp.asarray(draw(1), jnp.float32)}}
    moved = []
    for options in ({}, dict(cautious=True)):
        solver = thalweg.optax.muon(0.1, layout="flax", **options)
        updates, _ = solver.update(grads, solver.init(params), params)
        moved.append(np.asarray(updates["dense"]["kernel"]))
    agrees = moved[0] * draw(1) < 0
    assert 0 < agrees.mean() < 1
    assert np.array_equal(moved[1] != 0, agrees)
    assert np.allclose(moved[1], moved[0] * agrees / agrees.mean(), rtol=1e-5)


def test_averages_of_a_mixture() -> None:
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    solver = thalweg.optax.mixture([("w", thalweg.optax.adamw(0.1, averaged=0.5)), ("*", thalweg.optax.sgd(0.1))])
    grads = jax.tree.map(jnp.ones_like, params)
    updates, state = solver.update(grads, solver.init(params), params)
    after = jax.tree.map(jnp.add, params, updates)
    found = thalweg.optax.averaged(solver, state, after)
    assert np.allclose(found["w"], (params["w"] + after["w"]) / 2)
    assert np.array_equal(found["b"], after["b"])
    plain = thalweg.optax.sgd(0.1)
    with pytest.raises(OptionError, match="no parameter has an average"):
        thalweg.optax.averaged(plain, plain.init(params), params)


# ---- an average is of what was applied, whatever follows the rule in a chain


def take(solver: Any, params: Any, steps: int) -> tuple[Any, Any, list[Any]]:
    """Twenty steps of a quadratic loss; the parameters, the state, and the parameters after each step."""
    state, after = solver.init(params), []
    for _ in range(steps):
        updates, state = jax.jit(solver.update)(jax.tree.map(lambda w: w - 1.0, params), state, params)
        params = optax.apply_updates(params, updates)
        after.append(np.asarray(params["w"]))
    return params, state, after


SGD = dict(averaged=0.9)
CHAINS: dict[str, Any] = {
    "alone": lambda: thalweg.optax.sgd(0.1, **SGD),
    "scale": lambda: optax.chain(thalweg.optax.sgd(1.0, **SGD), optax.scale(0.1)),
    "schedule": lambda: optax.chain(
        thalweg.optax.sgd(1.0, **SGD), optax.scale_by_schedule(optax.linear_schedule(0.2, 0.05, 20))
    ),
    "masked": lambda: optax.chain(optax.masked(thalweg.optax.sgd(1.0, **SGD), {"w": True}), optax.scale(0.1)),
    "finite": lambda: optax.apply_if_finite(optax.chain(thalweg.optax.sgd(1.0, **SGD), optax.scale(0.1)), 3),
    "partition": lambda: optax.chain(
        optax.partition({"all": thalweg.optax.sgd(1.0, **SGD)}, {"w": "all"}), optax.scale(0.1)
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_an_average_is_of_what_a_chain_applies(chain: str) -> None:
    with jax.enable_x64(True):
        solver, wanted = CHAINS[chain](), np.array([3.0, -2.0])
        params, state, after = take(solver, {"w": jnp.asarray(wanted)}, 20)
        for p in after:
            wanted = 0.9 * wanted + 0.1 * p
        assert np.allclose(thalweg.optax.averaged(solver, state, params)["w"], wanted, rtol=1e-12)


def test_zeros_are_gradients_and_an_average_goes_on_to_the_weights() -> None:
    with jax.enable_x64(True):
        solver, params, before = thalweg.optax.sgd(0.1, **SGD), {"w": jnp.ones(2)}, jnp.ones(2)
        state = solver.init(params)
        for step in range(6):
            updates, state = solver.update({"w": jnp.full(2, float(step < 2))}, state, params)
            params = optax.apply_updates(params, updates)
            before = 0.9 * before + 0.1 * params["w"]
            assert np.allclose(thalweg.optax.averaged(solver, state, params)["w"], before, rtol=1e-12)


def test_an_average_counts_the_steps_that_multisteps_takes() -> None:
    with jax.enable_x64(True):
        solver = optax.MultiSteps(optax.chain(thalweg.optax.sgd(1.0, **SGD), optax.scale(0.1)), 2)
        wanted = np.array([3.0, -2.0])
        params, state, after = take(solver, {"w": jnp.asarray(wanted)}, 20)
        for p in after[1::2]:
            wanted = 0.9 * wanted + 0.1 * p
        assert np.allclose(thalweg.optax.averaged(solver, state, params)["w"], wanted, rtol=1e-12)


def test_schedule_free_evaluates_an_average_of_what_a_chain_applies() -> None:
    """The rule steps z by what it takes y to be: x stays among the points that were trained at, and is no worse."""
    with jax.enable_x64(True):
        solver = optax.chain(thalweg.optax.sgd(1.0, schedule_free=0.9), optax.scale(0.1))
        params, state, _ = take(solver, {"w": jnp.asarray([3.0, -2.0])}, 200)
        evaluated = np.asarray(thalweg.optax.averaged(solver, state, params)["w"])
        assert np.abs(evaluated - 1.0).max() < 0.3
