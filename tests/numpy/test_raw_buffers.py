"""Buffers of float32 that are stepped by name: a shape that nobody has told exempts nothing from the published rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import bits

from thalweg.numpy import LAMB, LARS

SIZE = 12
DECAYED: Any = dict(lr=0.02, weight_decay=0.1)


def step_thrice(optimizer: Any, shape: tuple[int, ...] | None, whole: bool = False) -> Any:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE).astype(np.float32)
    for t in range(3):
        gradient = (rng.standard_normal(SIZE) * (1 + t)).astype(np.float32)
        if whole:
            optimizer.step({"layer": weights}, {"layer": gradient})
        else:
            optimizer.update("layer", weights, gradient, shape=shape)
            optimizer.end_iteration()
    return bits(weights)


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_a_buffer_has_the_rule_of_matrices_unless_it_was_declared_a_vector(make: Any) -> None:
    """With a shape, or as an array of a whole model: there it is a bias, without decay and trust ratio."""
    options = dict(DECAYED, exempt="vectors")
    published = step_thrice(make(**dict(DECAYED, exempt=None)), None)
    assert step_thrice(make(**options), None) == published
    assert step_thrice(make(**options), (3, 4)) == published
    exempt = step_thrice(make(lr=0.02, trust=False), None)
    assert exempt != published
    assert step_thrice(make(**options), (SIZE,)) == step_thrice(make(**options), None, whole=True) == exempt


def test_lamb_has_it_by_default_and_lars_has_not() -> None:
    assert step_thrice(LAMB(**DECAYED), (SIZE,)) == step_thrice(LAMB(lr=0.02, trust=False), None)
    assert step_thrice(LARS(**DECAYED), (SIZE,)) == step_thrice(LARS(**DECAYED, exempt=None), None)


def test_a_shape_that_is_told_later_counts_from_then_on() -> None:
    optimizer, weights = LAMB(0.1), np.full(4, 8.0)
    optimizer.update("layer", weights, np.ones(4))
    assert optimizer.stats()["layer"]["trust_ratio"] == pytest.approx(8.0)
    optimizer.update("layer", weights, np.ones(4), shape=(4,))
    assert optimizer.stats()["layer"]["trust_ratio"] == 1.0


def test_overrides_by_name() -> None:
    exempt = LAMB(**DECAYED, overrides=[("layer", dict(trust=False, weight_decay=0.0))])
    assert step_thrice(exempt, None) == step_thrice(LAMB(lr=0.02, trust=False), None)
