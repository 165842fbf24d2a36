"""SGD with momentum (Polyak 1964; Sutskever and others 2013), as torch and optax have it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from thalweg.arrays import Scalar, Shape, Squares, State
from thalweg.rules.blocks import is_zero
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.options import option
from thalweg.rules.rule import Rule, Update


@dataclass(frozen=True, kw_only=True)
class SGD(Rule):
    """p moves against its gradient, or against a fading sum of gradients."""

    momentum: Scalar = option(0.0, "Decay of the momentum buffer.", low=0, below=1, stores="momentum_dtype")
    dampening: Scalar = option(
        0.0,
        "The fraction of each gradient, except the first, that does not enter the momentum buffer.",
        low=0,
        high=1,
        needs="momentum",
    )
    weight_decay: Scalar = option(0.0, "L2 decay: `weight_decay * p` is added to the gradient.", low=0)
    nesterov: bool = option(False, "Nesterov momentum.", needs="momentum", requires={True: "dampening = 0"})

    default_lr = 1e-3
    typical_lr = 0.1
    looks_at_shapes = False
    VARIANTS = {"torch": {}, "optax": {}}
    OPTAX = {"momentum": ("momentum", None), "nesterov": "nesterov", "accumulator_dtype": "momentum_dtype"}
    TORCH = ("momentum", "dampening", "weight_decay", "nesterov")

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        (g_squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(p))))
        step = g + self.weight_decay * p
        state: State[Any] = {}
        if s:
            fresh = 1.0 if is_zero(self.dampening) else xp.where(t <= 1, 1.0, 1 - self.dampening)
            state["momentum_buffer"] = buffer = self.momentum * s["momentum_buffer"] + fresh * step
            step = step + self.momentum * buffer if self.nesterov else buffer
        return Update(step * (-lr * lr_scale), state, xp.isfinite(g_squares), {"grad_norm": xp.sqrt(g_squares)}, step)
