"""Stochastic rounding: each number goes to a neighbour, and tiny steps count on average.

tests/kernels/test_stochastic_rounding.py has that chances differ by seed, name and step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import bfloat16, bits
from tolerances import MONTE_CARLO

from thalweg.numpy import LARS, Optimizer

every_dtype = pytest.mark.parametrize("name", ["float16", "bfloat16"])


def dtype(name: str) -> Any:
    return np.dtype(bfloat16() if name == "bfloat16" else name)


def sgd(lr: float, **options: Any) -> Optimizer:
    """p - lr * g, exactly."""
    return LARS(lr, trust=False, momentum=0.0, **{"rounding": "stochastic", **options})


@every_dtype
@pytest.mark.parametrize("start", [1.0, -1.0, 3e-5, 1000.0, 0.0])
def test_results_are_right_on_average(name: str, start: float) -> None:
    """Over 20,000 elements, for a result a third of the way between two neighbours, of 0 too."""
    kind = dtype(name)
    weights = np.full(20_000, start).astype(kind)
    first = float(weights[0])
    distance = float(np.nextafter(weights[0], kind.type(np.inf))) - first
    sgd(1.0).update("w", weights, np.full(20_000, -distance / 3, "float32"))
    moved = (weights.astype("float64") - first) / distance
    assert set(np.unique(moved)) == {0.0, 1.0}
    assert abs(moved.mean() - 1 / 3) < MONTE_CARLO / 3


def below_and_above(x: Any, name: str) -> tuple[Any, Any]:
    """The two numbers of a 16-bit dtype next to x, as float32. For bfloat16 by cutting off half of the bits."""
    if name == "float16":
        near = x.astype("float16")
        low = np.where(near.astype("float32") <= x, near, np.nextafter(near, np.float16(-np.inf)))
        high = np.where(near.astype("float32") >= x, near, np.nextafter(near, np.float16(np.inf)))
        return low.astype("float32"), high.astype("float32")
    toward_zero = (x.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
    away = ((x.view("uint32") & np.uint32(0xFFFF0000)) + np.uint32(0x10000)).view("float32")
    away = np.where(toward_zero == x, x, away)
    return np.minimum(toward_zero, away), np.maximum(toward_zero, away)


@pytest.mark.parametrize(("name", "sizes"), [("float16", (-24.0, 15.9)), ("bfloat16", (-133.0, 126.0))])
def test_numbers_of_all_sizes_go_to_a_neighbour(name: str, sizes: tuple[float, float]) -> None:
    """What can be written is left; infinities and NaN too. Native code: tests/kernels/test_stochastic_rounding.py."""

    def rounded(x: Any) -> Any:
        weights = np.zeros(x.shape, dtype(name))
        sgd(1.0, engine="reference").update("w", weights, -x)
        return weights.astype("float32")

    rng = np.random.default_rng(0)
    x = (2.0 ** rng.uniform(*sizes, 4000) * rng.choice([-1.0, 1.0], 4000)).astype("float32")
    low, high = below_and_above(x, name)
    assert (low < high).mean() > 0.9
    found = rounded(x)
    assert ((found == low) | (found == high)).all()
    assert 0.4 < (found == high)[low < high].mean() < 0.6
    assert np.array_equal(rounded(low), low)
    special = np.array([np.nan, np.inf, -np.inf, 0.0], "float32")
    assert np.array_equal(rounded(special), special, equal_nan=True)


@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_wide_parameters_are_never_rounded(wide: str) -> None:
    params = np.full((2, 100), 0.1, wide)
    for weights, rounding in zip(params, ("nearest", "stochastic"), strict=True):
        sgd(0.3, rounding=rounding).update("w", weights, np.ones(100))
    assert bits(params[0]) == bits(params[1]) != bits(np.full(100, 0.1, wide))
