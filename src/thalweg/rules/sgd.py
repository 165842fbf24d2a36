"""SGD with momentum (Polyak 1964; Sutskever and others 2013), as torch and optax have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import is_zero
from thalweg.rules.checks import check_flag, check_fraction, check_number, require
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """p moves against its gradient, or against a fading sum of gradients."""

    momentum: Scalar = 0.0
    #: What a gradient loses before it enters the sum; the first one loses nothing.
    dampening: Scalar = 0.0
    weight_decay: Scalar = 0.0
    nesterov: bool = False

    default_lr: ClassVar[float | None] = 1e-3

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"torch": {}, "optax": {}}

    ELSEWHERE: ClassVar[Mapping[str, str]] = {**Rule.ELSEWHERE, "accumulator_dtype": "momentum_dtype"}

    TORCH: ClassVar[tuple[str, ...]] = ("momentum", "dampening", "weight_decay", "nesterov")
    OPTAX: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "momentum": ("momentum", None),
        "nesterov": ("nesterov", False),
        "accumulator_dtype": ("momentum_dtype", None),
    }

    def validate(self) -> None:
        super().validate()
        check_fraction("momentum", self.momentum)
        check_number("dampening", self.dampening, low=0.0, high=1.0)
        check_number("weight_decay", self.weight_decay, low=0.0)
        check_flag("nesterov", self.nesterov)
        require(not self.nesterov or is_zero(self.dampening), "nesterov=True needs dampening=0")

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        if is_zero(self.momentum):
            idle |= dict.fromkeys(("nesterov", "dampening", "momentum_dtype"), "a momentum above 0")
        return idle

    @property
    def looks_at_shapes(self) -> bool:
        return False

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}

    def update(
        self,
        xp: Space[A],
        g: A,
        s: State[A],
        p: A,
        *,
        t: Scalar,
        lr: Scalar | None,
        lr_scale: Scalar = 1.0,
        noise: Noise[A] | None = None,
    ) -> Update:
        assert lr is not None
        (g_squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(p))))
        step = g + self.weight_decay * p
        state: State[A] = {}
        if s:
            fresh = 1.0 if is_zero(self.dampening) else xp.where(t <= 1, 1.0, 1 - self.dampening)
            state["momentum_buffer"] = buffer = self.momentum * s["momentum_buffer"] + fresh * step
            step = step + self.momentum * buffer if self.nesterov else buffer
        return Update(step * (-lr * lr_scale), state, xp.isfinite(g_squares), {"grad_norm": xp.sqrt(g_squares)})
