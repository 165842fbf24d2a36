"""The wrappers of optax around the optimizers: chains, partitions, guards, injection; and functions over states."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import tolerances
from optax_runs import GRADS, MADE, PARAMS, SOON, Tree, assert_alike, every_function, run, same_bits

import thalweg.optax
from thalweg.optax import adafactor, lamb, lars
from thalweg.rules import RULES

pytestmark = pytest.mark.slow  # many small programs are compiled

MASK = {"w": True, "b": False}


def injected(factory: Any, *static: str, **options: Any) -> Any:
    return optax.inject_hyperparams(factory, static_args=static)(**{"learning_rate": 0.1, **options})


def by_parts() -> Any:
    return optax.partition({"x": lamb(0.1, weight_decay=0.5, mask=MASK), "y": lars(0.1)}, {"w": "x", "b": "y"})


SCHEDULE = optax.linear_schedule(0.1, 0.0, 4)
OPTIONS: Any = dict(weight_decay=0.1, b1=lambda count: 0.9 - 0.1 * count)
#: A solver within wrappers, and one whose steps are the same.
SAME: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "chain": (
        lambda: optax.chain(optax.clip(1e3), MADE["lars"](0.1), optax.scale(2.0)),
        lambda: MADE["lars"](0.2),
    ),
    "partition": (
        by_parts,
        lambda: thalweg.optax.mixture([("w", lamb(0.1, weight_decay=0.5)), ("b", lars(0.1))]),
    ),
    "masked": (
        lambda: optax.chain(optax.clip(1e3), optax.masked(optax.apply_if_finite(lamb(0.1), 5), True)),
        lambda: lamb(0.1),
    ),
    "schedules": (lambda: injected(lamb, learning_rate=SCHEDULE, **OPTIONS), lambda: lamb(SCHEDULE, **OPTIONS)),
    "a mask and a pair": (
        lambda: injected(lamb, mask=MASK, weight_decay=0.1, trust_clip=(0.0, 10.0), max_grad_norm=1.0),
        lambda: lamb(0.1, mask=MASK, weight_decay=0.1, trust_clip=(0.0, 10.0), max_grad_norm=1.0),
    ),
    "no trust": (lambda: injected(lars, trust=False), lambda: lars(0.1, trust=False)),
    "stacks": (lambda: injected(lars, "stacked_axes", stacked_axes=0), lambda: lars(0.1, stacked_axes=0)),
}


@pytest.mark.parametrize("what", SAME)
def test_wrapped_solvers_step_as_alone(what: str) -> None:
    found, expected = (run(make())[0] for make in SAME[what])
    assert_alike(found, expected, tolerances.FLOAT32)
    assert not same_bits(found, PARAMS)


def test_apply_if_finite_leaves_parameters_and_state_at_a_nan_and_keeps_dtypes() -> None:
    tx = optax.apply_if_finite(lamb(0.1), max_consecutive_errors=5)
    params, good = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in (PARAMS, GRADS))
    update = jax.jit(tx.update, compiler_options=SOON)
    first, state = update(good, tx.init(params), params)
    nothing, after = update({**good, "w": good["w"].at[0, 0].set(jnp.nan)}, state, params)
    assert all((x != 0).any() for x in jax.tree.leaves(first))
    assert all((x == 0).all() and x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nothing))
    assert after.total_notfinite == 1
    assert same_bits(after.inner_state, state.inner_state)


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
    tx = injected(getattr(thalweg.optax, name), *STATIC.get(name, ()), **options)
    update, state = jax.jit(tx.update, compiler_options=SOON), tx.init(matrix)
    first, _ = update(gradients, state, matrix)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    second, _ = update(gradients, state, matrix)
    assert update._cache_size() == 1
    assert_alike(second, jax.tree.map(lambda x: 2 * x, first), tolerances.FLOAT32)


@pytest.mark.parametrize("name", STATIC)
def test_the_static_args_that_injection_needs_are_told(name: str) -> None:
    """One after the other: none of the table is too many."""
    options, told = {"layout": "torch"} if name == "muon" else {}, list[str]()
    for _ in STATIC[name]:
        with pytest.raises(ValueError, match="static_args") as caught:
            injected(getattr(thalweg.optax, name), *told, **options).init(PARAMS)
        told.append(next(own for own in STATIC[name] if own in str(caught.value) and own not in told))
    assert set(told) == set(STATIC[name])


def test_an_injected_option_that_is_refused_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="weight_decay must be a finite number >= 0"):
        injected(lamb, weight_decay=-1.0).init(PARAMS)
    with pytest.raises(ValueError, match=r"stacked_axes.*static_args"):
        injected(lamb, stacked_axes=1).init(PARAMS)


# ---- optax.contrib


def loss(params: Tree) -> jax.Array:
    return sum(jnp.sum((p - 0.25) ** 2) for p in jax.tree.leaves(params))


CONTRIB: dict[str, Callable[[Any], Any]] = {
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, learning_rate=0.1, b1=0.9),
    "mechanize": lambda tx: optax.contrib.mechanize(tx, s_init=1e-2),
    "sam": lambda tx: optax.contrib.sam(tx, optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2),
    "adversary of sam": lambda tx: optax.contrib.sam(optax.sgd(0.1), tx, sync_period=2),
    "reduce_on_plateau": lambda tx: optax.chain(tx, optax.contrib.reduce_on_plateau(factor=0.5, patience=3)),
}


@pytest.mark.parametrize("wrapper", CONTRIB)
def test_wrapped_solvers_descend_by_one_program(wrapper: str) -> None:
    tx = CONTRIB[wrapper](MADE["lamb"](0.1))
    params, state = PARAMS, tx.init(PARAMS)

    @partial(jax.jit, compiler_options=SOON)
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


@every_function
def test_mapping_over_the_parameters_of_a_state_reaches_all_but_the_counts(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    state = tx.init(PARAMS)
    mapped = optax.tree_map_params(tx, lambda x: x + 7, state, transform_non_params=lambda x: x - 1)
    assert (mapped.count, mapped.skipped) == (-1, -1)
    counts = dict(count=None, skipped=None)
    assert same_bits(mapped._replace(**counts), jax.tree.map(lambda x: x + 7, state._replace(**counts)))
    # where a parameter has no entry, or several, the state has None, or a tuple
    own = dict(is_leaf=lambda x: x is None or isinstance(x, tuple)) if name in ("adafactor", "kron") else {}
    shapes = optax.tree_map_params(tx, lambda x, key: (key, getattr(x, "shape", ())), state, dict(w="w", b="b"), **own)
    momentum = "exp_avg" if name in ("adafactor", "lamb") else "momentum_buffer"
    assert getattr(shapes, momentum) == {"w": ("w", (4, 3)), "b": ("b", (3,))}


@pytest.mark.parametrize(
    ("factory", "options"),
    [
        (lamb, dict(mask=MASK, weight_decay=0.1)),
        (lamb, dict(stacked_axes={"w": 1, "b": 0})),
        (lars, dict(trust_ratio_mask=MASK)),
        (adafactor, dict(weight_decay_mask=MASK, weight_decay_rate=0.1)),
        (lamb, dict(mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params), weight_decay=0.1)),
        (lamb, dict(overrides=[("b", dict(weight_decay=0.1))])),
    ],
)
def test_mapping_over_a_state_goes_with_options_by_leaf(factory: Any, options: dict[str, Any]) -> None:
    tx = factory(0.1, **options)
    mapped = optax.tree_map_params(tx, lambda x: x + 7, tx.init(PARAMS))
    assert mapped.count == 0
    assert all((x >= 7).all() for x in jax.tree.leaves(mapped._replace(count=None)))


@every_function
def test_states_are_searched_by_name(name: str) -> None:
    state = optax.chain(optax.clip(1.0), MADE[name](0.1)).init(PARAMS)
    assert optax.tree.get(optax.tree.set(state, count=jnp.int32(5)), "count") == 5
    field = {"lamb": "exp_avg_sq", "adafactor": "variance", "lars": "momentum_buffer", "kron": "Q"}[name]
    assert set(optax.tree.get(state, field)) == {"w", "b"}
