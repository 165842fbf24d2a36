"""AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101) and Adam (Kingma, Ba 2015, arXiv:1412.6980)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thalweg.arrays import Scalar, Shape, Squares
from thalweg.rules.blocks import average, one_minus_power
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.options import BETAS, Mask, option
from thalweg.rules.rule import Rule, Update


@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """The average of gradients over the root of the average of their squares, and decay apart from both."""

    betas: tuple[Scalar, Scalar] = option(
        (0.9, 0.999), "Decay rates of the first and the second moment.", low=0, below=1, elsewhere=BETAS
    )
    eps: Scalar = option(1e-8, "Added to the root of the second moment.", low=0, elsewhere="epsilon")
    weight_decay: Scalar = option(0.01, "See `decoupled`.", low=0)
    amsgrad: bool = option(False, "Divide by the largest second moment so far. Needs 4 more bytes per parameter.")
    nesterov: bool = option(False, "Nesterov momentum, as in `optax.nadamw`.")
    decoupled: bool = option(
        True,
        "p shrinks by `lr * weight_decay` of itself in each step. `False`: decay is added to the gradient (Adam).",
        elsewhere="decoupled_weight_decay",
    )
    eps_root: Scalar = option(0.0, "Added to the second moment, under the root.", low=0)

    default_lr = 1e-3
    typical_lr = 0.01
    looks_at_shapes = False
    VARIANTS = {"torch": {}, "optax": {"weight_decay": 1e-4}}
    OPTAX = {
        **{"b1": "betas[0]", "b2": "betas[1]", "eps": "eps", "eps_root": "eps_root", "mu_dtype": "momentum_dtype"},
        **{"weight_decay": "weight_decay", "mask": Mask("weight_decay"), "*": "", "nesterov": "nesterov"},
    }

    TORCH: ClassVar[tuple[str, ...]] = ("betas", "eps", "weight_decay", "amsgrad")

    @property
    def is_decay_apart(self) -> bool:
        return self.decoupled

    def entries(self, shape: Shape) -> dict[str, Entry]:
        largest: dict[str, Entry] = {"max_exp_avg_sq": Square()} if self.amsgrad else {}
        return {"exp_avg": Moment(), "exp_avg_sq": Square(), **largest}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        lr, (b1, b2) = lr * lr_scale, self.betas
        if not self.decoupled:
            g = g + self.weight_decay * p
        m, v = average(s["exp_avg"], g, 1 - b1), average(s["exp_avg_sq"], g * g, 1 - b2)
        state, square = {"exp_avg": m, "exp_avg_sq": v}, v
        if self.amsgrad:
            state["max_exp_avg_sq"] = square = xp.maximum(s["max_exp_avg_sq"], v)
        mean = m / one_minus_power(xp, b1, t)
        if self.nesterov:
            mean = b1 * m / one_minus_power(xp, b1, t + 1) + (1 - b1) * g / one_minus_power(xp, b1, t)
        u = mean / (xp.sqrt(square / one_minus_power(xp, b2, t) + self.eps_root) + self.eps)
        axes = self.own_axes(xp.shape(p))
        u_squares, g_squares = xp.sums(Squares(u, axes), Squares(g, axes))
        delta = (u + self.weight_decay * p) * -lr if self.decoupled else u * -lr
        stats = {"update_norm": xp.sqrt(u_squares), "grad_norm": xp.sqrt(g_squares)}
        # a g * g that overflows leaves u finite and v stuck at infinity, so both sums are asked
        return Update(delta, state, xp.isfinite(u_squares + g_squares), stats, mean)
