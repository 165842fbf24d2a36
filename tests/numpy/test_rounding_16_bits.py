"""Stochastic rounding: tiny steps count on average. tests/test_boundary.py has what becomes of each number, and
tests/kernels/test_stochastic_rounding.py that chances differ by seed, name and step."""

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


@every_dtype
def test_steps_far_below_the_distance_count_as_in_float32(name: str) -> None:
    kind = dtype(name)
    ulp = float(np.nextafter(kind.type(1), kind.type(2))) - 1.0
    start, gradient = np.ones(4096), np.ones(4096, "float32")
    stochastic, nearest, wide = start.astype(kind), start.astype(kind), start.astype("float32")
    lr = ulp / 40
    first, second, third = sgd(lr), sgd(lr, rounding="nearest"), sgd(lr)
    for _ in range(200):
        first.update("w", stochastic, gradient)
        second.update("w", nearest, gradient)
        third.update("w", wide, gradient)
    assert bits(nearest) == bits(start.astype(kind))
    far = (1 - wide.astype("float64")).mean()
    assert far > 4 * ulp
    assert abs((1 - stochastic.astype("float64")).mean() / far - 1) < MONTE_CARLO
