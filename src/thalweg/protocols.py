"""Types for code that works with any of our optimizers, or with yours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class LearningRate(Protocol):
    """Has a learning rate that can be read and set."""

    @property
    def lr(self) -> Any: ...
    @lr.setter
    def lr(self, value: Any) -> None: ...


@runtime_checkable
class StepOptimizer(Protocol):
    """Steps tensors, one by one under their names, or all at once."""

    def update(self, name: str | int, weights: Any, gradient: Any, /) -> None: ...
    def step(self, params: Mapping[str, Any] | Sequence[Any], grads: Mapping[str, Any] | Sequence[Any], /) -> None: ...
