"""What the library was asked for first, as users of Python call it, where no other test has it.

Buffers by name and shape, counts and scales: tests/numpy/test_name_by_name.py. Copies, builders and what is out of
range: test_every_option.py there. Formulas: tests/published and tests/rules. Names and defaults: docs/coming_from.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT64

from thalweg.numpy import LAMB, LARS, Adafactor, Kron
from thalweg.protocols import LearningRate, StepOptimizer


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    "optimizer", [Adafactor(), LAMB(0.1), LARS(0.1), Kron(0.1)], ids=lambda each: each.rule.__name__
)
def test_every_optimizer_has_the_interface(optimizer: Any) -> None:
    assert isinstance(optimizer, LearningRate)
    assert isinstance(optimizer, StepOptimizer)
    assert optimizer.update("w", drawn(4, 3), drawn(4, 3, seed=1)) is None
    assert optimizer.end_iteration() is None
    assert optimizer.lr_scale("w") == 1.0
    assert optimizer.num_parameters == 1


def test_kron_caps_each_coordinate_of_its_update_and_folds_the_decay_into_the_gradient() -> None:
    optimizer = Kron(0.1, variant="polyak", momentum=0.0)
    weights = drawn(6, 4)
    for t in range(5):
        before = weights.copy()
        optimizer.update("w", weights, 1e3 * drawn(6, 4, seed=t))
        assert np.abs(before - weights).max() <= 0.1 * (1 + FLOAT64)
    decayed, added, grad = drawn(6, 4), drawn(6, 4), drawn(6, 4, seed=9)
    Kron(0.1, variant="polyak", weight_decay=0.3).update("w", decayed, grad)
    Kron(0.1, variant="polyak").update("w", added, grad + 0.3 * added)
    assert np.allclose(decayed, added, rtol=FLOAT64, atol=FLOAT64)
