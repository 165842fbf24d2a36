"""Code for any optimizer: ours are recognised, and so are others that do as ours do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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


both = pytest.mark.parametrize("protocol", [LearningRate, StepOptimizer])


@both
def test_ours_and_others_are_recognised_and_what_lacks_the_methods_is_not(protocol: type) -> None:
    assert all(isinstance(own, protocol) for own in (LARS(0.1), Descent(0.1)))
    assert not any(isinstance(other, protocol) for other in (object(), 3, {}, np.ones(3)))


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
