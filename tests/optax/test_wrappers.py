"""The wrappers of optax around the optimizers: chains, guards, injection; averages and states within them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import GRADS, MADE, PARAMS, Tree, assert_alike, compiled, every_function, run, same_bits

import thalweg.optax
from thalweg import OptionError
from thalweg.optax import adamw, averaged, lamb, lars, mixture, sgd
from thalweg.rules import RULES

pytestmark = pytest.mark.slow  # many small programs are compiled

MASK = {"w": True, "b": False}


def injected(factory: Any, *static: str, **options: Any) -> Any:
    return optax.inject_hyperparams(factory, static_args=static)(**{"learning_rate": 0.1, **options})


def by_parts() -> Any:
    return optax.partition({"x": lamb(0.1, weight_decay=0.5, mask=MASK), "y": lars(0.1)}, {"w": "x", "b": "y"})


SCHEDULES: Any = dict(
    learning_rate=optax.linear_schedule(0.1, 0.0, 4), weight_decay=0.1, b1=lambda count: 0.9 - 0.1 * count
)
PAIR: Any = dict(learning_rate=0.1, mask=MASK, weight_decay=0.1, trust_clip=(0.0, 10.0), max_grad_norm=1.0)
#: A solver within wrappers, and one whose steps are the same.
SAME: dict[str, tuple[Any, Any]] = {
    "partition": (by_parts(), mixture([("w", lamb(0.1, weight_decay=0.5)), ("b", lars(0.1))])),
    "schedules": (injected(lamb, **SCHEDULES), lamb(**SCHEDULES)),
    "a mask and a pair": (injected(lamb, **PAIR), lamb(**PAIR)),
}


@pytest.mark.parametrize("what", SAME)
def test_wrapped_solvers_step_as_alone(what: str) -> None:
    found, expected = (run(solver)[0] for solver in SAME[what])
    assert_alike(found, expected, tolerances.FLOAT32)
    assert not same_bits(found, PARAMS)


def test_apply_if_finite_leaves_parameters_and_state_at_a_nan_and_keeps_dtypes() -> None:
    tx = optax.apply_if_finite(lamb(0.1), max_consecutive_errors=5)
    params, good = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in (PARAMS, GRADS))
    update = compiled(tx.update)
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
def test_the_static_args_of_the_docs_are_those_that_injection_needs(name: str) -> None:
    """An error names each that is missing, one after the other: none of the table is too many. Then steps are made."""
    params, options = ({"w": PARAMS["w"]}, {"layout": "torch"}) if name == "muon" else (PARAMS, {})
    factory, told = getattr(thalweg.optax, name), list[str]()
    for _ in STATIC.get(name, ()):
        with pytest.raises(ValueError, match="static_args") as caught:
            injected(factory, *told, **options).init(PARAMS)
        told.append(next(own for own in STATIC[name] if own in str(caught.value) and own not in told))
    tx = injected(factory, *told, **options)
    updates, _ = jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_an_injected_learning_rate_takes_effect_when_changed_in_the_state() -> None:
    tx = injected(lamb)
    update, state = compiled(tx.update), tx.init(PARAMS)
    first, _ = update(GRADS, state, PARAMS)
    state.hyperparams["learning_rate"] = jnp.asarray(0.2, jnp.float32)
    second, _ = update(GRADS, state, PARAMS)
    assert update._cache_size() == 1
    assert_alike(second, jax.tree.map(lambda x: 2 * x, first), tolerances.FLOAT32)


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
}


@pytest.mark.parametrize("wrapper", CONTRIB)
def test_wrapped_solvers_descend_by_one_program(wrapper: str) -> None:
    tx = CONTRIB[wrapper](lamb(0.1, weight_decay=0.1))
    params, state = PARAMS, tx.init(PARAMS)

    @compiled
    def step(params: Tree, state: Any) -> tuple[Tree, Any]:
        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(40):
        params, state = step(params, state)
    assert step._cache_size() == 1
    assert loss(params) < 0.9 * loss(PARAMS)


# ---- averages of weights: of what was applied, whatever follows the rule in a chain

START = np.array([3.0, -2.0])
ONE: Any = sgd(1.0, averaged=0.9)
#: A solver, and how many gradients it takes for a step.
CHAINS: dict[str, tuple[Any, int]] = {
    "alone": (sgd(0.1, averaged=0.9), 1),
    "schedule": (optax.chain(ONE, optax.scale_by_schedule(optax.linear_schedule(0.2, 0.05, 20))), 1),
    "masked": (optax.chain(optax.masked(ONE, {"w": True}), optax.scale(0.1)), 1),
    "finite": (optax.apply_if_finite(optax.chain(ONE, optax.scale(0.1)), 3), 1),
    "partition": (optax.chain(optax.partition({"all": ONE}, {"w": "all"}), optax.scale(0.1)), 1),
    "MultiSteps": (optax.MultiSteps(optax.chain(ONE, optax.scale(0.1)), 2), 2),
}


def train(solver: Any, steps: int, slope: Any) -> tuple[Any, Any, list[Any]]:
    """The parameters, the state, and the weights after each step."""
    params: Any = {"w": jnp.asarray(START)}
    state, update, after = solver.init(params), compiled(solver.update), []
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
    solver = mixture([("w", adamw(0.1, averaged=0.5)), ("*", sgd(0.1))])
    after, state = run(solver, steps=1)
    found = averaged(solver, state, after)
    assert np.allclose(found["w"], (PARAMS["w"] + after["w"]) / 2)
    assert np.array_equal(found["b"], after["b"])
    plain = sgd(0.1)
    with pytest.raises(OptionError, match="no parameter has an average"):
        averaged(plain, plain.init(PARAMS), PARAMS)


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


def test_mapping_over_a_state_goes_with_options_by_leaf() -> None:
    by_leaf: Any = dict(mask=MASK, stacked_axes={"w": 1, "b": 0}, overrides=[("b", dict(lr_scale=0.5))])
    tx = lamb(
        0.1, weight_decay=0.1, trust_ratio_mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params), **by_leaf
    )
    mapped = optax.tree_map_params(tx, lambda x: x + 7, tx.init(PARAMS))
    assert mapped.count == 0
    assert all((x >= 7).all() for x in jax.tree.leaves(mapped._replace(count=None)))


@every_function
def test_states_are_searched_by_name(name: str) -> None:
    state = optax.chain(optax.clip(1.0), MADE[name](0.1)).init(PARAMS)
    assert optax.tree.get(optax.tree.set(state, count=jnp.int32(5)), "count") == 5
    field = {"lamb": "exp_avg_sq", "adafactor": "variance", "lars": "momentum_buffer", "kron": "Q"}[name]
    assert set(optax.tree.get(state, field)) == {"w", "b"}
