"""Schedules that rules have as defaults."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import A, Scalar, Space
from thalweg.rules.checks import check_number


@dataclass(frozen=True)
class Annealed:
    """A value that is flat at ``high`` for ``flat`` steps, then falls exponentially to ``low``."""

    high: float = 1.0
    low: float = 0.03
    decay: float = 0.001
    flat: int = 500

    def __post_init__(self) -> None:
        check_number("high", self.high, low=0.0, high=1.0)
        check_number("low", self.low, low=0.0, high=self.high)
        check_number("decay", self.decay, low=0.0)
        check_number("flat", self.flat, low=0.0)

    def at(self, xp: Space[A], t: Scalar) -> Scalar:
        """The value at step t, counted from 1."""
        since = xp.maximum(t - 1 - self.flat, 0)
        return xp.maximum(self.high * xp.exp(-self.decay * since), self.low)
