"""Code for any optimizer: ours are recognised, and so are others that do as ours do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, every_case

from thalweg.numpy import LARS
from thalweg.protocols import LearningRate, StepOptimizer


class Descent:
    """Someone else's."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def update(self, name: str | int, weights: Any, gradient: Any) -> None:
        weights -= self.lr * gradient

    def step(self, params: Any, grads: Any) -> None:
        for name, weights in params.items():
            self.update(name, weights, grads[name])


@every_case
@pytest.mark.parametrize("protocol", [LearningRate, StepOptimizer])
def test_ours_are_recognised(make: Make, protocol: type) -> None:
    assert isinstance(make(), protocol)


@pytest.mark.parametrize("protocol", [LearningRate, StepOptimizer])
def test_so_are_others(protocol: type) -> None:
    assert isinstance(Descent(0.1), protocol)


@pytest.mark.parametrize("protocol", [LearningRate, StepOptimizer])
@pytest.mark.parametrize("other", [object(), 3, {}, np.ones(3)], ids=lambda x: type(x).__name__)
def test_what_lacks_the_methods_is_not(protocol: type, other: Any) -> None:
    assert not isinstance(other, protocol)


def test_each_asks_for_its_own_part_only() -> None:
    class OnlyRate:
        lr = 0.1

    class OnlySteps:
        def update(self, name: str | int, weights: Any, gradient: Any) -> None: ...
        def step(self, params: Any, grads: Any) -> None: ...

    assert isinstance(OnlyRate(), LearningRate)
    assert not isinstance(OnlyRate(), StepOptimizer)
    assert isinstance(OnlySteps(), StepOptimizer)
    assert not isinstance(OnlySteps(), LearningRate)


def test_one_loop_serves_both() -> None:
    def halve_and_step(optimizer: Any, weights: Any) -> None:
        assert isinstance(optimizer, LearningRate)
        assert isinstance(optimizer, StepOptimizer)
        optimizer.lr = optimizer.lr / 2
        optimizer.step({"w": weights}, {"w": np.ones(3)})

    ours, theirs = np.ones(3), np.ones(3)
    halve_and_step(LARS(0.5, trust=False, momentum=0.0), ours)
    halve_and_step(Descent(0.5), theirs)
    assert np.array_equal(ours, theirs)
