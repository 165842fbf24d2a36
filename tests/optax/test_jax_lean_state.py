"""State in eight bits under jit, over devices, and on its way to other front ends."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.numpy  # noqa: E402
import thalweg.optax  # noqa: E402
from thalweg.errors import StateError  # noqa: E402

night = partial(pytest.param, marks=pytest.mark.nightly)
SHAPES = {"first": (64, 128), "second": (64, 128), "filter": (64, 16, 3, 3), "bias": (64,)}


def arrays(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


def trained(solver: Any, dtype: Any = jnp.float32, steps: int = 3, state: Any = None) -> tuple[Any, Any]:
    params = {name: jnp.asarray(x, dtype) for name, x in arrays(0).items()}
    state = solver.init(params) if state is None else state

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for t in range(steps):
        params, state = step(params, state, {name: jnp.asarray(g, dtype) for name, g in arrays(100 + t).items()})
    return params, state


@pytest.mark.parametrize(
    ("rule", "rounding"), [("lamb", "stochastic"), night("adamw", "nearest"), night("kron", "nearest")]
)
def test_codes_are_those_of_numpy(rule: str, rounding: str) -> None:
    options: Any = dict(state_dtype="int8", state_rounding=rounding)
    params, state = trained(getattr(thalweg.optax, rule)(0.01, **options))
    exported = thalweg.optax.export_state(state, params)
    name = {"lamb": "LAMB", "adamw": "AdamW", "kron": "Kron"}[rule]
    other = getattr(thalweg.numpy, name)(0.01, engine="reference", **options, **OPTAX.get(rule, {}))
    plain = arrays(0)
    for t in range(3):
        other.step(plain, arrays(100 + t))
    for parameter, entries in other.state.items():
        found = exported["state"][parameter]
        assert found.keys() == entries.keys()
        for key, entry in entries.items():
            assert found[key].shape == entry.shape
            if entry.dtype.kind in "iu" and key != "step":
                assert found[key].dtype == entry.dtype
                assert (found[key] != entry).mean() < 5e-3, (parameter, key)


#: What optax's functions have by default, and rules do not.
OPTAX = {"adamw": dict(weight_decay=1e-4)}


def test_fields_are_added_to_the_state_only_where_they_are_needed() -> None:
    params = {name: jnp.asarray(x) for name, x in arrays(0).items()}
    plain, lean = thalweg.optax.lamb(0.01).init(params), thalweg.optax.lamb(0.01, state_dtype="int8").init(params)
    assert type(plain).__name__ == "LambState"
    assert set(lean._fields) - set(plain._fields) == {"exp_avg_scale", "exp_avg_sq_scale"}
    assert lean.exp_avg_scale["first"].shape == (64, 2)
    assert lean.exp_avg_scale["bias"] is None
    specs = {name: jax.sharding.PartitionSpec("x") for name in params}
    made = thalweg.optax.state_specs(lean, params, specs)
    assert made.exp_avg_scale["first"] == jax.sharding.PartitionSpec("x", None)


def test_weights_with_a_record_follow_those_of_32_bits() -> None:
    """Steps of a hundredth of the distance between neighbours, all in one direction."""
    p = {"w": jnp.ones(64, jnp.bfloat16)}
    moved = {}
    for rounding in ("nearest", "compensated"):
        solver = thalweg.optax.sgd(1.0, rounding=rounding)
        params, state = p, solver.init(p)

        def step(_: int, before: Any, solver: Any = solver) -> Any:
            updates, state = solver.update({"w": jnp.full(64, -(2.0**-7) / 100, jnp.bfloat16)}, *reversed(before))
            return optax.apply_updates(before[0], updates), state

        params, state = jax.lax.fori_loop(0, 200, step, (params, state))
        moved[rounding] = float(params["w"][0]) - 1
    assert moved == {"nearest": 0.0, "compensated": 2 * 2.0**-7}


@pytest.mark.nightly
def test_exported_state_is_imported_to_the_bit() -> None:
    lean = thalweg.optax.lamb(0.01, state_dtype="int8")
    params, state = trained(lean)
    exported = thalweg.optax.export_state(state, params)
    same = thalweg.optax.import_state(lean.init(params), params, exported)
    assert all(jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("exp_avg_scale", np.full((64, 2), np.nan, "float32"), "'exp_avg_scale' must be finite"),
        ("exp_avg_scale", np.ones((64, 4), "float32"), "'first' does not fit"),
        ("exp_avg", np.ones((64, 128), "float32"), "'exp_avg' is float32, and must be int8"),
        ("exp_avg_sq", np.ones((64, 128), "int8"), "'exp_avg_sq' is int8, and must be uint8"),
    ],
)
def test_damaged_codes_are_refused(key: str, value: Any, message: str) -> None:
    """tests/numpy/test_lean_state.py has more, told by the same code."""
    params = {"first": jnp.ones((64, 128))}
    state = thalweg.optax.lamb(0.01, state_dtype="int8").init(params)
    state = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), state)
    exported = thalweg.optax.export_state(state, params)
    entries = exported["state"]["first"] | {key: value}
    exported["state"]["first"] = {name: entry for name, entry in entries.items() if entry is not None}
    with pytest.raises(StateError, match=message):
        thalweg.optax.import_state(state, params, exported)


@pytest.mark.nightly
def test_what_is_not_finite_leaves_codes_and_record_as_they_were() -> None:
    """As infinity, and as a number whose square is."""
    solver = thalweg.optax.lamb(0.01, state_dtype="int8", rounding="compensated", on_nonfinite="skip")
    params = {"first": jnp.ones((64, 128), jnp.bfloat16)}
    state = solver.update(params, solver.init(params), params)[1]
    for bad in (jnp.inf, 1e30):
        updates, after = solver.update({"first": params["first"].at[5, 7].set(bad)}, state, params)
        assert not updates["first"].any()
        for field in ("exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "rounding_error"):
            assert jnp.array_equal(getattr(after, field)["first"], getattr(state, field)["first"])
