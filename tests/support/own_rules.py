"""Rules of one's own, as a user would write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from thalweg import Moment, Rule, Update, average, sign


@dataclass(frozen=True, kw_only=True)
class Signed(Rule):
    """The sign of an average of gradients."""

    beta: float = 0.9
    weight_decay: float = 0.0
    signed: bool = True

    def entries(self, shape: Any) -> dict[str, Any]:
        return {"exp_avg": Moment()}

    def update(
        self, xp: Any, g: Any, s: Any, p: Any, *, t: Any, lr: Any, lr_scale: Any = 1.0, noise: Any = None
    ) -> Update:
        m = average(s["exp_avg"], g, 1 - self.beta)
        u = sign(xp, m) if self.signed else m
        return Update((u + self.weight_decay * p) * (-lr * lr_scale), {"exp_avg": m})


@dataclass(frozen=True, kw_only=True)
class Turned(Signed):
    """One of which no fused code can be made, because it turns matrices."""

    default_lr: ClassVar[float | None] = 0.5

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        return super().update(xp, xp.swapaxes(xp.swapaxes(g, 0, -1), 0, -1), s, p, **rest)


every = pytest.mark.parametrize("rule", [Signed, Turned], ids=lambda rule: rule.__name__)
