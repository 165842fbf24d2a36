"""Steps that are not finite, spikes, clipping of all gradients together, and climbing."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import GRADS, MADE, PARAMS, assert_alike, compiled, every_function, same_bits, take_step
from spiked import KINDS, STEPS, draw, factors_by_hand

import thalweg.numpy
from thalweg import OptionError, Spikes, StateError
from thalweg.optax import adamw, export_state, import_state, lamb, lars, make_step, mixture, sgd, stats, with_stats

pytestmark = pytest.mark.slow  # many small programs are compiled


@every_function
def test_one_bad_element_leaves_all_parameters_state_and_counts_as_they_were(name: str) -> None:
    """Also where gradients are clipped, of zero too."""
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=100.0)
    update = compiled(tx.update)
    _, first = update(jax.tree.map(jnp.zeros_like, GRADS), tx.init(PARAMS), PARAMS)
    assert (first.count, first.skipped) == (1, 0)
    state = first
    for number, (key, place, bad) in enumerate((("w", (1, 2), jnp.nan), ("b", (0,), -jnp.inf)), start=1):
        updates, state = update({**GRADS, key: GRADS[key].at[place].set(bad)}, state, PARAMS)
        assert all((x == 0).all() for x in jax.tree.leaves(updates))
        assert (state.count, state.skipped, state.skipped.dtype) == (1, number, jnp.int32)
    assert same_bits(state._replace(skipped=None), first._replace(skipped=None))
    found, state = update(GRADS, state, PARAMS)
    assert same_bits(found, update(GRADS, first, PARAMS)[0])
    assert (state.count, state.skipped) == (2, 2)
    assert update._cache_size() == 1


def test_a_float16_parameter_that_would_overflow_is_not_finite() -> None:
    params, grads = {"w": jnp.full((4, 3), 60000.0, jnp.float16)}, {"w": jnp.full((4, 3), -1.0, jnp.float16)}
    updates, state = take_step(lars(1e6, on_nonfinite="skip"), params, grads)
    assert (state.count, state.skipped) == (0, 1)
    assert (updates["w"] == 0).all()


def test_clipping_by_the_joint_norm_is_that_of_optax_before() -> None:
    updates, state = take_step(MADE["adafactor"](0.1, max_grad_norm=jnp.array(0.5)))
    expected, (_, other) = take_step(optax.chain(optax.clip_by_global_norm(0.5), MADE["adafactor"](0.1)))
    assert_alike((updates, state), (expected, other), tolerances.FLOAT32)
    assert optax.tree.norm(GRADS) > 0.5


# ---- spikes


def train(solver: Any, how: str = "update", params: Any = None, state: Any = None, first: int = 1) -> Any:
    """To the last step of the run from one of them on."""
    params = jax.tree.map(jnp.asarray, draw(0)) if params is None else params
    state = solver.init(params) if state is None else state

    def update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = solver.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    step = compiled(make_step(solver) if how == "step" else update)
    for t in range(first, STEPS + 1):
        params, state = step(params, state, draw(t))
    return params, state


def assert_near(params: Any, wanted: Any) -> None:
    assert all(np.max(np.abs(params[name] - p)) < tolerances.FLOAT64 for name, p in wanted.items())


@pytest.mark.parametrize(("how", "kind"), [("update", "skip"), ("step", "quantile"), ("update", "scale")])
def test_steps_at_spikes_are_those_of_numpy(how: str, kind: str) -> None:
    optimizer, wanted = thalweg.numpy.AdamW(lr=0.1, weight_decay=0.01, spikes=KINDS[kind]), draw(0)
    for t in range(1, STEPS + 1):
        optimizer.step(wanted, draw(t))
    params, state = train(with_stats(adamw(0.1, weight_decay=0.01, spikes=KINDS[kind])), how)
    assert_near(params, wanted)
    factors = factors_by_hand(KINDS[kind])
    assert stats(state)["a"]["spikes"] == state.inner_state.spikes[0] == sum(f != 1.0 for f in factors)
    assert state.inner_state.count == STEPS - factors.count(None)
    skipped = optax.tree_utils.tree_get(state, "skipped")
    assert skipped == factors.count(None) if KINDS[kind].action == "skip" else skipped is None


@pytest.mark.parametrize(("how", "kind"), [("step", "skip"), ("update", "clip")])
def test_a_mixture_has_one_norm(how: str, kind: str) -> None:
    wanted, factors = draw(0), factors_by_hand(KINDS[kind])
    apart = {"a": thalweg.numpy.SGD(lr=0.1), "b": thalweg.numpy.AdamW(lr=0.1, weight_decay=0.0)}
    for t, factor in enumerate(factors, 1):
        for name, optimizer in apart.items() if factor is not None else ():
            optimizer.step({name: wanted[name]}, {name: draw(t)[name] * factor})
    params, state = train(mixture([("a", sgd(0.1)), ("b", adamw(0.1, weight_decay=0.0))], spikes=KINDS[kind]), how)
    assert_near(params, wanted)
    assert state.spikes[0] == sum(f != 1.0 for f in factors)
    assert state.skipped == (factors.count(None) or None)
    with pytest.raises(OptionError, match=r"spikes concerns the whole step: give it to mixture\(\)"):
        mixture([("*", adamw(0.1, spikes=True))])


def test_norms_of_former_steps_go_to_numpy_and_come_back() -> None:
    options: Any = dict(weight_decay=0.01, spikes=KINDS["clip"])
    solver, optimizer = adamw(0.1, **options), thalweg.numpy.AdamW(lr=0.1, **options)
    params, state = train(solver, first=STEPS - 7)
    optimizer.load_state_dict(export_state(state, params))
    back = import_state(solver.init(params), params, optimizer.state_dict())
    assert same_bits(back.spikes, state.spikes)
    others = {name: np.array(p) for name, p in params.items()}
    optimizer.step(others, draw(STEPS))
    assert_near(train(solver, "update", params, back, STEPS)[0], others)


def test_state_of_another_window_is_refused() -> None:
    state = lamb(0.1, spikes=True).init(PARAMS)
    with pytest.raises(StateError, match="spikes has window=8, and the state has 128 norms"):
        lamb(0.1, spikes=Spikes(window=8)).update(PARAMS, state, PARAMS)
    with pytest.raises(StateError, match="not a state of this optimizer"):
        lamb(0.1).update(PARAMS, state, PARAMS)
