"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, rescaled layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares
from thalweg.rules.blocks import clip, one_minus_power, ratio_unless, regain_norm
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.exempt import TrustRule
from thalweg.rules.options import BETAS, Mask, option
from thalweg.rules.rule import Update


@dataclass(frozen=True, kw_only=True)
class LAMB(TrustRule):
    """u = Adam's direction + decay p; each tensor moves by lr |p| along u / |u|."""

    betas: tuple[Scalar, Scalar] = option(
        (0.9, 0.999), "Decay rates of the first and the second moment.", low=0, below=1, elsewhere=BETAS
    )
    eps: Scalar = option(1e-6, "Added to the root of the second moment.", low=0, elsewhere="epsilon")
    weight_decay: Scalar = option(0.0, "See `weight_decay_mode`.", low=0)
    bias_correction: bool = option(
        True, "Correct the bias of moments that start at zero, as Adam does.", elsewhere="debias correct_bias"
    )
    grad_averaging: bool = option(
        True, "`False`: a new gradient enters the first moment with weight 1 instead of 1 - b1."
    )
    trust: bool = option(True, "`False`: every trust ratio is 1, which is AdamW.", elsewhere={"adam": "trust=False"})
    exempt: Literal["vectors"] | None = option(
        "vectors",
        "`'vectors'`: tensors of fewer than two axes have neither trust ratio nor decay. `None`: all are alike, as "
        "in the paper.",
    )
    always_adapt: bool = option(
        True,
        "`False`: the ratio is 1 for tensors whose `weight_decay` is 0, as in apex and timm.",
        needs="trust",
        elsewhere="use_nvlamb",
    )
    keep_norms: bool = option(
        False,
        "`True`: after the step, each tensor with a trust ratio is rescaled to its norm before the step.",
        needs="trust",
    )
    trust_clip: tuple[Scalar, Scalar] | None = option(
        None, "Clip the ratio to (low, high); high may be infinite.", is_range=True, needs="trust"
    )
    phi: tuple[Scalar, Scalar] | None = option(
        None,
        "Clip ‖p‖ to (low, high) before it enters the ratio.",
        is_range=True,
        needs="trust",
        elsewhere={"clamp_value": "phi=(0, clamp_value)"},
    )
    eps_root: Scalar = option(0.0, "Added to the second moment, under the root.", low=0)
    weight_decay_mode: Literal["in_update", "decoupled", "l2"] = option(
        "in_update",
        "`'in_update'`: decay is added to `u` and rescaled with it. `'decoupled'`: p also shrinks by "
        "`lr * weight_decay` of itself, as in AdamW. `'l2'`: decay is added to the gradient.",
        elsewhere={
            "adam_w_mode": "weight_decay_mode='in_update', or 'l2'",
            "decouple_weight_decay": "weight_decay_mode='decoupled'",
            "decoupled_decay": "weight_decay_mode='decoupled'",
        },
    )

    default_lr = 1e-3
    typical_lr = 0.02
    first_default = "paper"
    VARIANTS = {
        "paper": {"exempt": None},
        "optax": {"exempt": None},
        "apex": {"exempt": None, "weight_decay": 0.01, "always_adapt": False, "max_grad_norm": 1.0},
        "nvlamb": {"exempt": None, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "lambc": {"exempt": None, "weight_decay": 0.01, "max_grad_norm": 1.0, "trust_clip": (0.0, 1.0)},
    }
    OPTAX = {
        **{"b1": "betas[0]", "b2": "betas[1]", "eps": "eps", "eps_root": "eps_root", "weight_decay": "weight_decay"},
        **{"mask": Mask("weight_decay"), "*": "", "trust_ratio_mask": Mask("trust", default=True)},
    }

    @property
    def is_decay_apart(self) -> bool:
        return self.weight_decay_mode == "decoupled" and not (self.trust and self.keep_norms)

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        return (lr or 0.0) * p_rms if self.trust else lr or 0.0

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment(), "exp_avg_sq": Square()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        lr, (b1, b2) = lr * lr_scale, self.betas
        if self.weight_decay_mode == "l2":
            g = g + self.weight_decay * p
        m = b1 * s["exp_avg"] + (1 - b1 if self.grad_averaging else 1.0) * g
        v = b2 * s["exp_avg_sq"] + (1 - b2) * (g * g)
        mean, square = m, v
        if self.bias_correction:
            mean, square = m / one_minus_power(xp, b1, t), v / one_minus_power(xp, b2, t)
        u = mean / (xp.sqrt(square + self.eps_root) + self.eps)
        if self.weight_decay_mode == "in_update":
            u = u + self.weight_decay * p

        axes = self.own_axes(xp.shape(p))
        keeps = self.trust and self.keep_norms
        along = [(p * u, axes)] if keeps else []
        p_squares, u_squares, g_squares, *products = xp.sums(
            Squares(p, axes), Squares(u, axes), Squares(g, axes), *along
        )
        p_norm, u_norm = xp.sqrt(p_squares), xp.sqrt(u_squares)
        # under "decoupled" the parameter is measured after its decay
        decay = lr * self.weight_decay if self.weight_decay_mode == "decoupled" else 0.0
        remaining = 1 - decay
        ratio = self.ratio(xp, xp.abs(remaining) * p_norm, u_norm) if self.trust else 1.0
        move = ratio * lr
        if keeps:
            # what a step takes from |p|^2, as a part of it, follows from the sums above: memory is not read once more
            unit = xp.where(p_norm <= 0, 1.0, p_norm)
            shared, length = move / unit * (products[0] / unit), move * u_norm / unit
            lost = xp.where(p_norm <= 0, 0.0, decay * (2 - decay) + 2 * remaining * shared - length * length)
            turned, more = regain_norm(xp, lost)
            delta = (more * remaining - decay) * p - (turned * move) * u
        else:
            delta = u * -move
            if self.weight_decay_mode == "decoupled":
                delta = delta - decay * p
        stats = {"trust_ratio": ratio, "param_norm": p_norm, "update_norm": u_norm, "grad_norm": xp.sqrt(g_squares)}
        # a g * g that overflows leaves u finite and v stuck at infinity, so both sums are asked
        return Update(delta, {"exp_avg": m, "exp_avg_sq": v}, xp.isfinite(u_squares + g_squares), stats, u)

    def ratio(self, xp: Space[A], p_norm: Scalar, u_norm: Scalar) -> Scalar:
        """The trust ratio, from the two norms; 1 where either is zero."""
        if self.phi is not None:
            p_norm = clip(xp, p_norm, self.phi)
        ratio = ratio_unless(xp, xp.minimum(p_norm, u_norm) <= 0, p_norm, u_norm, 1.0)
        if self.trust_clip is not None:
            ratio = clip(xp, ratio, self.trust_clip)
        return ratio if self.always_adapt else xp.where(self.weight_decay != 0, ratio, 1.0)
