"""Lion (Chen and others 2023, arXiv:2302.06675): the sign of an average of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import Scalar, Shape, Squares
from thalweg.rules.blocks import average, sign
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.options import BETAS, Mask, option
from thalweg.rules.rule import Rule, Update


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """Every weight moves by lr, against the sign of an average of its gradients; decay is apart from it."""

    betas: tuple[Scalar, Scalar] = option(
        (0.9, 0.99),
        "Decay rates of the average, in the sign and in the state.",
        low=0,
        below=1,
        elsewhere=BETAS,
    )
    weight_decay: Scalar = option(
        0.0, "Decoupled decay: p shrinks by `lr * weight_decay` of itself in each step.", low=0
    )

    default_lr = 1e-4
    typical_lr = 2e-3
    looks_at_shapes = False
    is_decay_apart = True
    VARIANTS = {"timm": {}, "optax": {"weight_decay": 1e-3}}
    OPTAX = {
        **{"b1": "betas[0]", "b2": "betas[1]", "mu_dtype": "momentum_dtype", "weight_decay": "weight_decay"},
        "mask": Mask("weight_decay"),
    }

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        b1, b2 = self.betas
        mean = average(s["exp_avg"], g, 1 - b1)
        u = sign(xp, mean) + self.weight_decay * p
        (g_squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(p))))
        state = {"exp_avg": average(s["exp_avg"], g, 1 - b2)}
        return Update(u * (-lr * lr_scale), state, xp.isfinite(g_squares), {"grad_norm": xp.sqrt(g_squares)}, mean)
