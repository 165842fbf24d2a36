"""Code for any optimizer: ours are recognised, and so are others that do as ours do."""

from __future__ import annotations

from typing import Any

import numpy as np

from thalweg.numpy import LARS
from thalweg.protocols import LearningRate, StepOptimizer


class OnlyRate:
    lr = 0.1


class OnlySteps:
    def update(self, name: str | int, weights: Any, gradient: Any) -> None: ...
    def step(self, params: Any, grads: Any) -> None: ...


class Both(OnlyRate, OnlySteps):
    pass


def test_each_protocol_recognises_what_has_its_part() -> None:
    for protocol, part in ((LearningRate, OnlyRate()), (StepOptimizer, OnlySteps())):
        assert all(isinstance(optimizer, protocol) for optimizer in (LARS(0.1), Both(), part))
        assert not any(isinstance(other, protocol) for other in (object(), 3, {}, np.ones(3)))
    assert not isinstance(OnlyRate(), StepOptimizer)
    assert not isinstance(OnlySteps(), LearningRate)
