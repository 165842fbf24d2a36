"""MARS (Yuan and others 2024, arXiv:2411.10438) on AdamW: gradients are corrected by those of the step before."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import Scalar, Shape, Squares
from thalweg.rules.adamw import AdamW
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.options import BETAS, Mask, option
from thalweg.rules.rule import Update


@dataclass(frozen=True, kw_only=True)
class MARS(AdamW):
    """AdamW, given g + gamma b1 / (1 - b1) (g - the last g), of each tensor clipped to norm 1, in place of g."""

    betas: tuple[Scalar, Scalar] = option(
        (0.95, 0.99), "Decay rates of the first and the second moment.", low=0, below=1, elsewhere=BETAS
    )
    weight_decay: Scalar = option(0.0, "See `decoupled`.", low=0)
    gamma: Scalar = option(0.025, "Strength of the correction; 0: gradients are only clipped.", low=0)

    default_lr = 3e-3
    typical_lr = 0.02
    looks_at_shapes = True
    VARIANTS = {}
    OPTAX = {"*": "", "b1": "betas[0]", "b2": "betas[1]", "weight_decay_mask": Mask("weight_decay")}
    TORCH = ()

    def treatment(self, shape: Shape) -> str:
        return "corrected gradient"

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {**super().entries(shape), "last_grad": Moment()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        b1, axes = self.betas[0], self.own_axes(xp.shape(p))
        c = g + (self.gamma * b1 / (1 - b1)) * (g - s["last_grad"])
        c_squares, g_squares = xp.sums(Squares(c, axes), Squares(g, axes))
        clipped = c / xp.maximum(xp.sqrt(c_squares), 1.0)
        update = super().update(xp, clipped, s, p, t=t, lr=lr, lr_scale=lr_scale)
        stats = {**update.stats, "corrected_norm": xp.sqrt(c_squares), "grad_norm": xp.sqrt(g_squares)}
        # squares that overflow would clip a gradient to nothing, so they are asked too
        finite = xp.isfinite(c_squares + g_squares + stats["update_norm"])
        return update._replace(state={**update.state, "last_grad": g}, finite=finite, stats=stats)
