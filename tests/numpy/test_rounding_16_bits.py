"""Stochastic rounding: tiny steps count on average, and what can be written exactly is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bfloat16, bits, every_case, gradients, model, train
from tolerances import MONTE_CARLO

from thalweg.numpy import LARS, Optimizer

NAMES = ["float16", "bfloat16"]


def dtype(name: str) -> Any:
    return bfloat16() if name == "bfloat16" else np.dtype(name)


def sgd(lr: float, **options: Any) -> Optimizer:
    """p - lr * g, exactly."""
    return LARS(lr, trust=False, momentum=0.0, **{"rounding": "stochastic", **options})


def neighbours(x: Any, kind: Any) -> tuple[Any, Any]:
    """The numbers of a 16-bit dtype next to x (float32) from below and from above."""
    nearest = x.astype(kind)
    below = np.where(nearest.astype("float32") <= x, nearest, np.nextafter(nearest, kind.type(-np.inf)))
    above = np.where(nearest.astype("float32") >= x, nearest, np.nextafter(nearest, kind.type(np.inf)))
    return below.astype(kind), above.astype(kind)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_one_of_the_two_neighbours_and_both_occur(name: str) -> None:
    kind, rng = np.dtype(dtype(name)), np.random.default_rng(0)
    weights = (rng.standard_normal(50_000) * np.exp(rng.uniform(-12, 8, 50_000))).astype(kind)
    gradient = (rng.standard_normal(50_000) * weights.astype("float32") * 0.01).astype("float32")
    exact = weights.astype("float32") - gradient
    below, above = neighbours(exact, kind)
    sgd(1.0).update("w", weights, gradient)
    assert ((weights == below) | (weights == above)).all()
    apart = below != above
    assert apart.mean() > 0.9
    assert 0.4 < (weights == above)[apart].mean() < 0.6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("start", [1.0, -1.0, 0.75, 3e-5, 1000.0])
def test_they_are_right_on_average(name: str, start: float) -> None:
    """Over 20,000 elements, for a result a third of the way between two neighbours."""
    kind = np.dtype(dtype(name))
    weights = np.full(20_000, start).astype(kind)
    first = float(weights[0])
    distance = float(np.nextafter(weights[0], kind.type(np.inf))) - first
    sgd(1.0).update("w", weights, np.full(20_000, -distance / 3, "float32"))
    moved = (weights.astype("float64") - first) / distance
    assert set(np.unique(moved)) == {0.0, 1.0}
    assert abs(moved.mean() - 1 / 3) < MONTE_CARLO / 3


@pytest.mark.parametrize("name", NAMES)
def test_what_can_be_written_is_written_exactly(name: str) -> None:
    """A step of nothing, a million times: no element may move."""
    weights = np.random.default_rng(0).standard_normal(1_000_000).astype(dtype(name))
    before = bits(weights)
    sgd(0.0).update("w", weights, np.ones(1_000_000, "float32"))
    assert bits(weights) == before


@pytest.mark.parametrize("name", NAMES)
def test_steps_far_below_the_distance_count_as_in_float32(name: str) -> None:
    kind = np.dtype(dtype(name))
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


@every_case
@pytest.mark.parametrize("name", NAMES)
def test_the_same_run_gives_the_same_bits(make: Make, name: str) -> None:
    first, second = (train(make(rounding="stochastic"), model(dtype(name)), gradients(3)) for _ in range(2))
    assert bits(first) == bits(second)
    other = train(make(rounding="stochastic", seed=1), model(dtype(name)), gradients(3))
    assert bits(first) != bits(other)


@pytest.mark.parametrize("name", NAMES)
def test_draws_differ_from_step_to_step_and_between_parameters(name: str) -> None:
    kind = np.dtype(dtype(name))
    gradient = np.full(64, 0.3 * (float(np.nextafter(kind.type(1), kind.type(2))) - 1.0), "float32")
    a, b, again = np.ones(64).astype(kind), np.ones(64).astype(kind), np.ones(64).astype(kind)
    optimizer = sgd(1.0)
    optimizer.update("a", a, gradient)
    optimizer.update("b", b, gradient)
    optimizer.update("a", again, gradient)
    assert len({x.tobytes() for x in (a, b, again)}) == 3


@every_case
@pytest.mark.parametrize("name", ["float32", "float64"])
def test_wide_parameters_are_not_rounded(make: Make, name: str) -> None:
    first = train(make(rounding="stochastic"), model(name), gradients(3))
    assert bits(first) == bits(train(make(), model(name), gradients(3)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_special_numbers_stay_what_they_are(name: str, value: float) -> None:
    weights = np.full(100, value).astype(dtype(name))
    sgd(1.0).update("w", weights, np.zeros(100, "float32"))
    assert np.array_equal(weights.astype("float32"), np.full(100, value, "float32"), equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_numbers_are_neighbours_of_zero(name: str) -> None:
    kind = np.dtype(dtype(name))
    smallest = float(np.nextafter(kind.type(0), kind.type(1)))
    weights = np.zeros(20_000, kind)
    sgd(1.0).update("w", weights, np.full(20_000, -smallest / 4, "float32"))
    assert set(np.unique(weights.astype("float64"))) == {0.0, smallest}
    assert abs((weights.astype("float64") / smallest).mean() - 1 / 4) < MONTE_CARLO / 4
