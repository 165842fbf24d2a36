"""What is around a rule, in JAX: equal to plain loops in float64; averages of a state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
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
