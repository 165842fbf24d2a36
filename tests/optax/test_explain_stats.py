"""What a solver will do with each parameter, and what its last step has found."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import run, take_step

from thalweg import OptionError, ParameterError, StateError
from thalweg.numpy import LAMB
from thalweg.optax import adamw, explain, export_state, kron, lamb, mixture, muon, sgd, state_specs, stats, with_stats

PARAMS: dict[str, Any] = {
    "net": {"w": jnp.arange(1.0, 13.0, dtype=jnp.float32).reshape(4, 3), "b": jnp.ones(3, jnp.bfloat16)},
    "out": [jnp.ones((3, 3), jnp.float32), jnp.full((3, 3), 2.0, jnp.float32)],
}
NAMES = ["net.b", "net.w", "out.0", "out.1"]


def test_rows_tell_treatment_bytes_and_what_looks_like_a_mistake() -> None:
    overrides = [("*.b", dict(trust=False)), ("head.*", dict(lr_scale=2.0)), ("out.1", dict(lr_scale=0.0))]
    solver = lamb(optax.linear_schedule(1e-5, 0.0, 10), weight_decay=0.1, overrides=overrides)
    found = explain(solver, PARAMS)
    assert [row.name for row in found.rows] == NAMES
    assert [row.treatment for row in found.rows] == ["no trust ratio", *["trust ratio"] * 3]
    fresh = lamb(1e-5, weight_decay=0.1, overrides=overrides[:1]).init(PARAMS)
    assert found.state_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(fresh)) - 4  # all but the one count
    bias, idle, unused = found.warnings
    assert bias.startswith("net.b: steps of about 1.0e-05 are below half the spacing of bfloat16")
    assert idle == "out.1: its learning rate is 0"
    assert unused == "overrides: 'head.*' matches no parameter"
    held = explain(lamb(0.1), {"good": jnp.ones(3), "bad": jnp.array([1.0, jnp.nan])}).warnings
    assert [told.partition(":")[0] for told in held if "it holds NaN" in told] == ["bad"]
    (warmed,) = explain(mixture([("*", adamw(optax.linear_schedule(0.0, 1e-3, 10)))]), PARAMS).warnings
    assert warmed == "all 4 parameters: its learning rate is 0"
    assert str(found.groups[0]) == ": 4 stepped, lr 1e-05; a schedule gives lr, shown here as at the first step"


def test_what_is_within_wrappers_is_found() -> None:
    labels = {"net": "first", "out": "second"}
    inner = optax.partition({"first": optax.inject_hyperparams(lamb)(0.1), "second": optax.sgd(0.1)}, labels)
    found = explain(optax.MultiSteps(optax.chain(optax.clip(1.0), inner), 2), PARAMS)
    assert [row.name for row in found.rows] == NAMES[:2]
    assert {row.weight_decay for row in found.rows} == {"in the state"}
    assert found.groups[0].lr == "in the state"


def test_a_mixture_is_explained_by_shapes_alone() -> None:
    solver = mixture([("*.b", sgd(0.1)), ("head.*", adamw(0.1)), ("*", with_stats(kron(1e-3)))])
    found = explain(solver, jax.eval_shape(lambda: PARAMS))
    assert [row.rule for row in found.rows] == ["SGD", "Kron", "Kron", "Kron"]
    assert [group.stepped for group in found.groups] == [1, 3]
    assert found.warnings == ["entries: 'head.*' matches no parameter"]


def test_figures_are_those_of_numpy_and_compile_once() -> None:
    solver = optax.chain(optax.scale(2.0), with_stats(lamb(0.1, weight_decay=0.1)))
    params = {name: PARAMS["net"]["w"] + i for i, name in enumerate("abc")}  # stepped as a stack
    _, state = run(solver, params, params)
    reference = LAMB(lr=0.1, weight_decay=0.1)
    arrays, grads = ({name: np.array(own * p) for name, p in params.items()} for own in (1, 2))
    for _ in range(2):
        reference.step(arrays, grads)
    found, expected = stats(state), reference.stats()
    assert found.keys() == expected.keys()
    for name, figures in expected.items():
        assert found[name].keys() == {*figures, "lr"}
        for key, value in figures.items():
            assert found[name][key] == pytest.approx(value, rel=tolerances.FLOAT32), (name, key)


def test_figures_go_with_wrappers_mixtures_and_layouts() -> None:
    entries = [("*.w", with_stats(muon(0.1))), ("*", sgd(0.1))]
    solver = optax.apply_if_finite(mixture(entries), 2)
    _, state = take_step(solver, PARAMS, PARAMS)
    assert stats(state).keys() == {"net.w"}
    assert export_state(state, PARAMS)["state"]["net.w"]["step"] == 1
    specs = state_specs(state, PARAMS, jax.sharding.PartitionSpec())
    assert jax.tree.structure(specs) == jax.tree.structure(state)


def test_what_cannot_be_explained_or_told_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"needs a transformation of .* in the solver"):
        explain(optax.adam(0.1), PARAMS)
    with pytest.raises(OptionError, match=r"put wrappers of optax around with_stats\(\)"):
        with_stats(optax.chain(lamb(0.1)))
    with pytest.raises(StateError, match=r"init\(\) of with_stats"):
        stats(lamb(0.1).init(PARAMS))
    with pytest.raises(StateError, match=r"needs a state of its own init\(\), got one of LambState"):
        with_stats(lamb(0.1)).update(PARAMS, lamb(0.1).init(PARAMS), PARAMS)
