"""The wrappers of optax around the optimizers: chains, masks, partitions, accumulation, guards and averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import by_turns, once
from optax_runs import GRADS, MADE, PARAMS, Tree, each, run

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled


@lru_cache
def plain(name: str, steps: int = 2) -> Tree:
    return run(MADE[name](0.1), steps=steps)[0]


def assert_alike(found: Tree, expected: Tree, before: Tree = PARAMS) -> None:
    for a, b, first in zip(*map(jax.tree.leaves, (found, expected, before)), strict=True):
        distance = float(jnp.abs(b - first).max())
        assert distance > 0
        assert float(jnp.abs(a - b).max()) <= tolerances.FLOAT32 * distance


@once(0)
@each
def test_chains_before_and_after(name: str) -> None:
    tx = optax.chain(optax.scale(-0.5), MADE[name](0.1), optax.scale(2.0))
    before = jax.tree.map(lambda g: -0.5 * g, GRADS)
    params, states = run(tx, steps=1)
    alone, state = run(MADE[name](0.1), grads=before, steps=1)
    doubled = jax.tree.map(lambda new, old: old + 2 * (new - old), alone, PARAMS)
    assert_alike(params, doubled)
    for a, b in zip(jax.tree.leaves(states), jax.tree.leaves(state), strict=True):
        assert (a == b).all()


@pytest.mark.parametrize("wrapper", [optax.multi_transform, optax.partition])
def test_each_part_of_a_partition_steps_as_alone(wrapper: Callable[..., Any]) -> None:
    labels = {"w": "lamb", "b": "lars"}
    params, _ = run(wrapper({"lamb": MADE["lamb"](0.1), "lars": MADE["lars"](0.1)}, labels))
    for key, name in labels.items():
        alone, _ = run(MADE[name](0.1), {key: PARAMS[key]}, {key: GRADS[key]})
        assert_alike({key: params[key]}, alone, {key: PARAMS[key]})


def test_a_mask_of_an_optimizer_inside_a_partition_is_a_tree_of_all_parameters() -> None:
    solver = partial(lamb, 0.1, weight_decay=0.5, mask={"w": True, "b": False})
    params, _ = run(optax.partition({"x": solver(), "y": solver()}, {"w": "x", "b": "y"}))
    assert_alike(params, run(solver())[0])


@by_turns("dtype", first=3)
@each
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_apply_if_finite_leaves_parameters_and_state_at_a_nan(name: str, dtype: Any) -> None:
    tx = optax.apply_if_finite(MADE[name](0.1), max_consecutive_errors=5)
    params = jax.tree.map(lambda p: p.astype(dtype), PARAMS)
    good = jax.tree.map(lambda g: g.astype(dtype), GRADS)
    bad = {**good, "w": good["w"].at[0, 0].set(jnp.nan)}
    update = jax.jit(tx.update)
    first, state = update(good, tx.init(params), params)
    nothing, after = update(bad, state, params)
    assert all((x != 0).any() for x in jax.tree.leaves(first))
    assert all((x == 0).all() and x.dtype == dtype for x in jax.tree.leaves(nothing))
    assert after.total_notfinite == 1
    for a, b in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        assert (a == b).all()


def test_bfloat16_parameters_with_float32_gradients_go_through_the_wrappers() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    expected, _ = run(lamb(0.1), params, GRADS)
    for wrapper in (
        lambda tx: optax.apply_if_finite(tx, 5),
        lambda tx: optax.chain(optax.clip(1.0), tx),
        lambda tx: optax.masked(tx, True),
    ):
        found, _ = run(wrapper(lamb(0.1)), params, GRADS)
        assert jax.tree.map(lambda a, b: bool((a == b).all()), found, expected) == {"w": True, "b": True}


@once(4)
@each
def test_lookahead_steps_its_fast_parameters_as_the_optimizer_does(name: str) -> None:
    tx = optax.lookahead(MADE[name](0.1), sync_period=5, slow_step_size=0.5)
    params, _ = run(tx, optax.LookaheadParams.init_synced(PARAMS), GRADS)
    assert_alike(params.fast, plain(name))
    assert all((params.slow[key] == PARAMS[key]).all() for key in PARAMS)


@once(5)
@each
def test_injected_learning_rates_take_effect_when_changed_in_the_state(name: str) -> None:
    static = {"adafactor": ADAFACTOR_STATIC, "kron": KRON_STATIC}.get(name, ())
    factory = {"adafactor": adafactor, "lamb": lamb, "lars": lars, "kron": kron}[name]
    tx = optax.inject_hyperparams(factory, static_args=static)(learning_rate=0.1)
    update = jax.jit(tx.update)
    state = tx.init(PARAMS)
    first, _ = update(GRADS, state, PARAMS)
    plain = factory(0.1)
    expected, _ = jax.jit(plain.update)(GRADS, plain.init(PARAMS), PARAMS)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    second, _ = update(GRADS, state, PARAMS)
    assert update._cache_size() == 1
    for key in PARAMS:
        size = float(jnp.abs(expected[key]).max())
        assert float(jnp.abs(first[key] - expected[key]).max()) <= tolerances.FLOAT32 * size
        assert float(jnp.abs(second[key] - 2 * expected[key]).max()) <= 2 * tolerances.FLOAT32 * size


ADAFACTOR_STATIC = ("min_dim_size_to_factor", "dtype_momentum")
KRON_STATIC = ("max_size_dense", "max_skew")


@pytest.mark.parametrize(("factory", "needed"), [(adafactor, ADAFACTOR_STATIC), (kron, KRON_STATIC)])
def test_the_static_args_that_injection_needs_are_told_compiled(factory: Any, needed: tuple[str, ...]) -> None:
    told: list[str] = []
    for _ in range(len(needed)):
        with pytest.raises(ValueError, match="static_args") as caught:
            optax.inject_hyperparams(factory, static_args=told)(learning_rate=0.1).init(PARAMS)
        told.append(next(name for name in needed if name in str(caught.value) and name not in told))
    assert set(told) == set(needed)
    optax.inject_hyperparams(factory, static_args=told)(learning_rate=0.1).init(PARAMS)


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lars, dict(trust=False)),
        (lars, dict(stacked_axes=0)),
        (lamb, dict(trust=False)),
        (lars, dict(momentum=0.0)),
        (lamb, dict(mask={"w": True, "b": False}, weight_decay=0.1)),
        (lamb, dict(trust_clip=(0.0, 10.0), max_grad_norm=1.0)),
    ],
)
def test_injection_goes_with_other_options(factory: Any, options: dict[str, Any]) -> None:
    static = ("stacked_axes",) if "stacked_axes" in options else ()
    tx = optax.inject_hyperparams(factory, static_args=static)(learning_rate=0.1, **options)
    assert_alike(run(tx)[0], run(factory(0.1, **options))[0])


def test_injected_schedules_and_options_are_those_of_the_optimizer() -> None:
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    tx = optax.inject_hyperparams(lamb)(learning_rate=schedule, weight_decay=0.1, b1=lambda count: 0.9 - 0.1 * count)
    found, state = run(tx, steps=3)
    expected, _ = run(lamb(schedule, weight_decay=0.1, b1=lambda count: 0.9 - 0.1 * count), steps=3)
    assert_alike(found, expected)
    assert np.isclose(state.hyperparams["learning_rate"], schedule(2))


def test_an_injected_option_that_is_refused_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0"):
        optax.inject_hyperparams(lamb)(learning_rate=0.1, weight_decay=-1.0).init(PARAMS)
    with pytest.raises(ValueError, match=r"stacked_axes.*static_args"):
        optax.inject_hyperparams(lamb)(learning_rate=0.1, stacked_axes=1).init(PARAMS)
