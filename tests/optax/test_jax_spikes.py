"""Spikes in JAX: the steps of numpy, by update and by make_step, of mixtures too."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from lanes import by_turns
from spiked import KINDS, STEPS, draw, factors_by_hand
from tolerances import FLOAT64

import thalweg.numpy
import thalweg.optax as ours
from thalweg import OptionError, Spikes, StateError

night = partial(pytest.param, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def wide() -> Any:
    with jax.enable_x64(True):
        yield


def train(solver: Any, how: str, params: Any = None, state: Any = None, steps: range = range(1, STEPS + 1)) -> Any:
    params = jax.tree.map(jnp.asarray, draw(0)) if params is None else params
    state = solver.init(params) if state is None else state

    def by_update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = solver.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    step = jax.jit(ours.make_step(solver) if how == "step" else by_update)
    for t in steps:
        params, state = step(params, state, draw(t))
    return params, state


def train_numpy(make: Any) -> Any:
    params = draw(0)
    for t in range(1, STEPS + 1):
        make.step(params, draw(t))
    return params


@by_turns()
@pytest.mark.parametrize(
    "kind", ["skip", "quantile", *(night(kind) for kind in KINDS if kind not in ("skip", "quantile"))]
)
@pytest.mark.parametrize("how", ["update", "step"])
def test_steps_are_those_of_numpy(kind: str, how: str) -> None:
    wanted = train_numpy(thalweg.numpy.AdamW(lr=0.1, weight_decay=0.01, spikes=KINDS[kind]))
    solver = ours.with_stats(ours.adamw(0.1, weight_decay=0.01, spikes=KINDS[kind]))
    params, state = train(solver, how)
    assert all(np.max(np.abs(params[name] - p)) < FLOAT64 for name, p in wanted.items())
    factors = factors_by_hand(KINDS[kind])
    assert ours.stats(state)["a"]["spikes"] == state.inner_state.spikes[0] == sum(f != 1.0 for f in factors)
    assert state.inner_state.count == STEPS - factors.count(None)
    skipped = optax.tree_utils.tree_get(state, "skipped")
    assert skipped == factors.count(None) if KINDS[kind].action == "skip" else skipped is None


@pytest.mark.parametrize(("kind", "how"), [("skip", "update"), night("skip", "step"), night("clip", "step")])
def test_a_mixture_has_one_norm(kind: str, how: str) -> None:
    wanted = draw(0)
    apart = {"a": thalweg.numpy.SGD(lr=0.1), "b": thalweg.numpy.AdamW(lr=0.1, weight_decay=0.0)}
    for t, factor in enumerate(factors_by_hand(KINDS[kind]), 1):
        for name, optimizer in apart.items() if factor is not None else ():
            optimizer.step({name: wanted[name]}, {name: draw(t)[name] * factor})
    theirs = [("a", ours.sgd(0.1)), ("b", ours.adamw(0.1, weight_decay=0.0))]
    params, state = train(ours.mixture(theirs, spikes=KINDS[kind]), how)
    assert all(np.max(np.abs(params[name] - p)) < FLOAT64 for name, p in wanted.items())
    assert state.spikes[0] == sum(f != 1.0 for f in factors_by_hand(KINDS[kind]))
    assert state.skipped == (factors_by_hand(KINDS[kind]).count(None) or None)
    with pytest.raises(OptionError, match=r"spikes concerns the whole step: give it to mixture\(\)"):
        ours.mixture([("*", ours.adamw(0.1, spikes=True))])


def test_state_goes_to_numpy_and_comes_back() -> None:
    solver = ours.adamw(0.1, weight_decay=0.01, spikes=KINDS["clip"])
    params, state = train(solver, "update", steps=range(1, 9))
    arrays = thalweg.numpy.AdamW(lr=0.1, weight_decay=0.01, spikes=KINDS["clip"])
    arrays.load_state_dict(ours.export_state(state, params))
    back = ours.import_state(solver.init(params), params, arrays.state_dict())
    assert jnp.array_equal(back.spikes, state.spikes)
    others = {name: np.array(p) for name, p in params.items()}
    arrays.step(others, draw(9))
    params, state = train(solver, "update", params, back, range(9, 10))
    assert all(np.max(np.abs(params[name] - p)) < FLOAT64 for name, p in others.items())


def test_state_of_another_window_is_refused() -> None:
    params = jax.tree.map(jnp.asarray, draw(0))
    state = ours.lamb(0.1, spikes=True).init(params)
    with pytest.raises(StateError, match="spikes has window=8, and the state has 128 norms"):
        ours.lamb(0.1, spikes=Spikes(window=8)).update(params, state, params)
    with pytest.raises(StateError, match="not a state of this optimizer"):
        ours.lamb(0.1).update(params, state, params)
