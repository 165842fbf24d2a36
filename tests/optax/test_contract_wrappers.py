"""The wrappers of optax around the optimizers: chains, partitions, guards, injection; and functions over states."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import once
from optax_runs import GRADS, MADE, PARAMS, Tree, each, run

import thalweg.optax
from thalweg.optax import adafactor, lamb, lars
from thalweg.rules import RULES

pytestmark = pytest.mark.slow  # many small programs are compiled


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


def test_each_part_of_a_partition_steps_as_alone() -> None:
    labels = {"w": "lamb", "b": "lars"}
    params, _ = run(optax.partition({"lamb": MADE["lamb"](0.1), "lars": MADE["lars"](0.1)}, labels))
    for key, name in labels.items():
        alone, _ = run(MADE[name](0.1), {key: PARAMS[key]}, {key: GRADS[key]})
        assert_alike({key: params[key]}, alone, {key: PARAMS[key]})


def test_a_mask_of_an_optimizer_inside_a_partition_is_a_tree_of_all_parameters() -> None:
    solver = partial(lamb, 0.1, weight_decay=0.5, mask={"w": True, "b": False})
    params, _ = run(optax.partition({"x": solver(), "y": solver()}, {"w": "x", "b": "y"}))
    assert_alike(params, run(solver())[0])


def test_bfloat16_parameters_with_float32_gradients_go_through_the_wrappers() -> None:
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    expected, _ = run(lamb(0.1), params, GRADS)
    wrapped = optax.chain(optax.clip(1.0), optax.masked(optax.apply_if_finite(lamb(0.1), 5), True))
    found, _ = run(wrapped, params, GRADS)
    assert jax.tree.map(lambda a, b: bool((a == b).all()), found, expected) == {"w": True, "b": True}


@once(3)
@each
def test_apply_if_finite_leaves_parameters_and_state_at_a_nan(name: str) -> None:
    tx = optax.apply_if_finite(MADE[name](0.1), max_consecutive_errors=5)
    params, good = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in (PARAMS, GRADS))
    bad = {**good, "w": good["w"].at[0, 0].set(jnp.nan)}
    update = jax.jit(tx.update)
    first, state = update(good, tx.init(params), params)
    nothing, after = update(bad, state, params)
    assert all((x != 0).any() for x in jax.tree.leaves(first))
    assert all((x == 0).all() and x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nothing))
    assert after.total_notfinite == 1
    for a, b in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        assert (a == b).all()


# ---- injected options


def static_args_in_the_docs() -> dict[str, tuple[str, ...]]:
    """By function, as the page of JAX has them."""
    page = (Path(__file__).parents[2] / "docs" / "jax.md").read_text(encoding="utf-8")
    table = page.split("| function | `static_args` |\n", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE)
    return {name: tuple(re.findall(r'`"(\w+)"`', options)) for name, options in rows}


STATIC = static_args_in_the_docs()


@pytest.mark.parametrize("name", [name.lower() for name in RULES])
def test_injected_learning_rates_take_effect_when_changed_in_the_state(name: str) -> None:
    matrix, options = ({"w": PARAMS["w"]}, {"layout": "torch"}) if name == "muon" else (PARAMS, {})
    gradients = {key: GRADS[key] for key in matrix}
    make = optax.inject_hyperparams(getattr(thalweg.optax, name), static_args=STATIC.get(name, ()))
    tx = make(learning_rate=0.1, **options)
    update, state = jax.jit(tx.update), tx.init(matrix)
    first, _ = update(gradients, state, matrix)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    second, _ = update(gradients, state, matrix)
    assert update._cache_size() == 1
    for key in matrix:
        size = float(jnp.abs(first[key]).max())
        assert float(jnp.abs(second[key] - 2 * first[key]).max()) <= 2 * tolerances.FLOAT32 * size


@pytest.mark.parametrize("name", STATIC)
def test_the_static_args_that_injection_needs_are_told(name: str) -> None:
    """One after the other: none of the table is too many."""
    options, told = {"layout": "torch"} if name == "muon" else {}, list[str]()
    for _ in STATIC[name]:
        with pytest.raises(ValueError, match="static_args") as caught:
            optax.inject_hyperparams(getattr(thalweg.optax, name), static_args=told)(0.1, **options).init(PARAMS)
        told.append(next(own for own in STATIC[name] if own in str(caught.value) and own not in told))
    assert set(told) == set(STATIC[name])


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        pytest.param(factory, options, marks=pytest.mark.nightly if place else ())
        for place, (factory, options) in enumerate(
            [
                (lamb, dict(mask={"w": True, "b": False}, weight_decay=0.1, trust_clip=(0.0, 10.0), max_grad_norm=1.0)),
                (lars, dict(trust=False)),
                (lars, dict(stacked_axes=0)),
                (lamb, dict(trust=False)),
                (lars, dict(momentum=0.0)),
            ]
        )
    ],
)
def test_injection_goes_with_other_options(factory: Any, options: dict[str, Any]) -> None:
    static = ("stacked_axes",) if "stacked_axes" in options else ()
    tx = optax.inject_hyperparams(factory, static_args=static)(learning_rate=0.1, **options)
    assert_alike(run(tx)[0], run(factory(0.1, **options))[0])


def test_injected_schedules_are_those_of_the_optimizer() -> None:
    options = dict(weight_decay=0.1, b1=lambda count: 0.9 - 0.1 * count)
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    found, state = run(optax.inject_hyperparams(lamb)(learning_rate=schedule, **options), steps=3)
    assert_alike(found, run(lamb(schedule, **options), steps=3)[0])
    assert np.isclose(state.hyperparams["learning_rate"], schedule(2))


def test_an_injected_option_that_is_refused_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0"):
        optax.inject_hyperparams(lamb)(learning_rate=0.1, weight_decay=-1.0).init(PARAMS)
    with pytest.raises(ValueError, match=r"stacked_axes.*static_args"):
        optax.inject_hyperparams(lamb)(learning_rate=0.1, stacked_axes=1).init(PARAMS)


# ---- optax.contrib, and what else may be around


def loss(params: Tree) -> jax.Array:
    return sum(jnp.sum((p - 0.25) ** 2) for p in jax.tree.leaves(params))


CONTRIB: dict[str, Callable[[Any], Any]] = {
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, learning_rate=0.1, b1=0.9),
    "mechanize": lambda tx: optax.contrib.mechanize(tx, s_init=1e-2),
    "sam": lambda tx: optax.contrib.sam(tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2),
    "adversary of sam": lambda tx: optax.contrib.sam(optax.sgd(0.1), tx, sync_period=2),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau(factor=0.5, patience=3)),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lamb", "lars"])
@pytest.mark.parametrize("wrapper", CONTRIB)
def test_wrapped_solvers_descend_by_one_program(name: str, wrapper: str) -> None:
    tx = CONTRIB[wrapper](MADE[name](0.1))
    params, state = PARAMS, tx.init(PARAMS)

    @jax.jit
    def step(params: Tree, state: Any) -> tuple[Tree, Any]:
        value, grads = jax.value_and_grad(loss)(params)
        extra = {"value": value} if wrapper == "reduce_on_plateau" else {}
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for _ in range(40):
        params, state = step(params, state)
    assert step._cache_size() == 1
    assert loss(params) < 0.9 * loss(PARAMS)


# ---- functions over states


@each
def test_mapping_over_the_parameters_of_a_state_reaches_all_but_the_counts(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    state = tx.init(PARAMS)
    mapped = optax.tree_map_params(tx, lambda x: x + 7, state, transform_non_params=lambda x: x - 1)
    assert (mapped.count, mapped.skipped) == (-1, -1)
    for field in set(state._fields) - {"count", "skipped"}:
        own, old = jax.tree.leaves(getattr(mapped, field)), jax.tree.leaves(getattr(state, field))
        assert all((a == b + 7).all() for a, b in zip(own, old, strict=True))
    # where a parameter has no entry, or several, the state has None, or a tuple
    own = dict(is_leaf=lambda x: x is None or isinstance(x, tuple)) if name in ("adafactor", "kron") else {}
    shapes = optax.tree_map_params(tx, lambda x, key: (key, getattr(x, "shape", ())), state, dict(w="w", b="b"), **own)
    momentum = "exp_avg" if name in ("adafactor", "lamb") else "momentum_buffer"
    assert getattr(shapes, momentum) == {"w": ("w", (4, 3)), "b": ("b", (3,))}


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lamb, dict(mask={"w": True, "b": False}, weight_decay=0.1)),
        (lamb, dict(stacked_axes={"w": 1, "b": 0})),
        (lars, dict(trust_ratio_mask={"w": True, "b": False})),
        (adafactor, dict(weight_decay_mask={"w": True, "b": False}, weight_decay_rate=0.1)),
        (lamb, dict(mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params), weight_decay=0.1)),
        (lamb, dict(overrides=[("b", dict(weight_decay=0.1))])),
    ],
)
def test_mapping_over_a_state_goes_with_options_by_leaf(factory: Any, options: dict[str, Any]) -> None:
    tx = factory(0.1, **options)
    mapped = optax.tree_map_params(tx, lambda x: x + 7, tx.init(PARAMS))
    assert mapped.count == 0
    assert all((x >= 7).all() for x in jax.tree.leaves(mapped._replace(count=None)))


@each
def test_states_are_searched_by_name_and_pickled(name: str) -> None:
    state = optax.chain(optax.clip(1.0), MADE[name](0.1)).init(PARAMS)
    assert optax.tree.get(optax.tree.set(state, count=jnp.int32(5)), "count") == 5
    field = {"lamb": "exp_avg_sq", "adafactor": "variance", "lars": "momentum_buffer", "kron": "Q"}[name]
    assert set(optax.tree.get(state, field)) == {"w", "b"}
    again = pickle.loads(pickle.dumps(state))
    assert type(again[1]) is type(state[1])
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
