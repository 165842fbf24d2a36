"""The examples in optax's documentation print the same lines with thalweg.optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.optax as ours  # noqa: E402

FALLING = ["1.39E+01", "1.38E+01", "1.38E+01", "1.37E+01", "1.36E+01"]
PRINTED = {"adafactor": FALLING, "lamb": FALLING, "lars": ["1.40E+01"] * 5}
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def f(x: Any) -> Any:
    return jnp.sum(x**2)


def lines(solver: Any, dtype: str, jit: Callable[[Any], Any]) -> list[str]:
    """What the example prints."""
    params = jnp.array([1.0, 2.0, 3.0], dtype)
    printed = [f"Objective function:  {f(params)}"]
    state, update = solver.init(params), jit(solver.update)
    for _ in range(5):
        updates, state = update(jax.grad(f)(params), state, params)
        params = optax.apply_updates(params, updates)
        printed.append(f"Objective function: {f(params):.2E}")
    return printed


@pytest.mark.nightly
@DTYPES
@pytest.mark.parametrize("jit", [jax.jit, lambda function: function], ids=["jit", "eager"])
@pytest.mark.parametrize("name", PRINTED)
def test_the_example_prints_the_documented_lines(name: str, jit: Any, dtype: str) -> None:
    wanted = ["Objective function:  14.0", *(f"Objective function: {value}" for value in PRINTED[name])]
    assert lines(getattr(ours, name)(learning_rate=0.003), dtype, jit) == wanted
    assert lines(getattr(optax, name)(learning_rate=0.003), dtype, jit) == wanted


def test_ten_times_the_learning_rate_prints_other_lines() -> None:
    assert lines(ours.adafactor(learning_rate=0.03), "float32", jax.jit)[1:] != [
        f"Objective function: {value}" for value in FALLING
    ]
