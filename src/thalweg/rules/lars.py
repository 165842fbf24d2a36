"""LARS (You, Gitman, Ginsburg 2017, arXiv:1708.03888): SGD with momentum, step sizes by layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import is_zero, keep_norm, ratio_unless
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.exempt import TrustRule
from thalweg.rules.options import Mask, option
from thalweg.rules.rule import Update


@dataclass(frozen=True, kw_only=True)
class LARS(TrustRule):
    """Each tensor moves in proportion to its own norm: ratio = eta |p| / (|g| + decay |p|)."""

    momentum: Scalar = option(
        0.9, "Decay of the momentum buffer; 0 keeps no state.", low=0, below=1, stores="momentum_dtype"
    )
    weight_decay: Scalar = option(0.0, "L2 decay, added to the gradient.", low=0)
    trust_coefficient: Scalar = option(
        1e-3,
        "The paper's eta: the fraction of its norm by which a tensor moves at `lr=1`.",
        above=0,
        needs="trust",
        elsewhere="trust_coeff trust_coef eta",
    )
    eps: Scalar = option(0.0, "Added to the denominator of the ratio.", low=0, needs="trust", elsewhere="epsilon")
    nesterov: bool = option(False, "Nesterov momentum.", needs="momentum")
    trust: bool = option(True, "`False`: every trust ratio is 1, which is SGD with momentum.")
    exempt: Literal["vectors"] | None = option(
        None,
        "`'vectors'`: tensors of fewer than two axes have neither trust ratio nor decay. `None`: all are alike, as "
        "in the paper.",
    )
    always_adapt: bool = option(
        True, "`False`: the ratio is 1 for tensors whose `weight_decay` is 0, as in timm.", needs="trust"
    )
    keep_norms: bool = option(
        False,
        "`True`: after the step, each tensor with a trust ratio is rescaled to its norm before the step.",
        needs="trust",
    )
    norm_mode: Literal["paper", "combined"] = option(
        "paper",
        "What the ratio measures: `'paper'` the norms of gradient and decay, added up; `'combined'` the norm of their "
        "sum.",
        needs="trust",
    )
    momentum_mode: Literal["lr_inside", "lr_outside"] = option(
        "lr_inside",
        "Whether `lr` scales what enters the momentum, or (`'lr_outside'`) what leaves it.",
        needs="momentum",
    )
    clip: bool = option(
        False,
        "LARC's clipping: the rate `lr * ratio` of a tensor never exceeds `lr`.",
        needs="trust",
        elsewhere="trust_clip",
    )
    zero_ratio: Scalar | Literal["eta"] = option(
        1.0,
        "The ratio where ‖p‖ or the measured norm is 0: a number, or `'eta'` for `trust_coefficient`.",
        low=0,
        needs="trust",
    )

    default_lr = 1.0
    typical_lr = 3.0
    VARIANTS = {
        "paper": {},
        "optax": {"norm_mode": "combined"},
        "timm": {"momentum": 0.0, "eps": 1e-8, "momentum_mode": "lr_outside", "always_adapt": False},
        "larc": {"trust_coefficient": 0.02, "eps": 1e-8, "momentum_mode": "lr_outside", "clip": True},
    }
    OPTAX = {
        **{"weight_decay": "weight_decay", "weight_decay_mask": Mask("weight_decay", default=True)},
        **{"trust_coefficient": "trust_coefficient", "eps": "eps", "trust_ratio_mask": Mask("trust", default=True)},
        **{"momentum": "momentum", "nesterov": "nesterov"},
    }

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        return (lr or 0.0) * self.trust_coefficient * p_rms if self.trust else lr or 0.0

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {} if is_zero(self.momentum) else {"momentum_buffer": Moment()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        lr = lr * lr_scale
        decayed = g + self.weight_decay * p
        measured = decayed if self.norm_mode == "combined" else g
        axes = self.own_axes(xp.shape(p))
        p_squares, g_squares = xp.sums(Squares(p, axes), Squares(measured, axes))
        p_norm, g_norm = xp.sqrt(p_squares), xp.sqrt(g_squares)
        ratio = self.ratio(xp, p_norm, g_norm, lr) if self.trust else 1.0

        step = decayed * (ratio * lr if self.momentum_mode == "lr_inside" else ratio)
        state: State[Any] = {}
        if s:
            state["momentum_buffer"] = buffer = self.momentum * s["momentum_buffer"] + step
            step = step + self.momentum * buffer if self.nesterov else buffer
        delta = -step if self.momentum_mode == "lr_inside" else step * -lr
        finite = xp.isfinite(g_squares)
        if self.trust and self.keep_norms:
            (new_squares,) = xp.sums(Squares(p + delta, axes))
            turned = keep_norm(xp, p_norm, new_squares)
            delta = (turned - 1) * p + turned * delta
            finite = xp.isfinite(g_squares + new_squares)
        stats = {"trust_ratio": ratio, "param_norm": p_norm, "grad_norm": g_norm}
        return Update(delta, state, finite, stats)

    def ratio(self, xp: Space[A], p_norm: Scalar, g_norm: Scalar, lr: Scalar) -> Scalar:
        """The trust ratio, from the two norms."""
        decay_norm = self.weight_decay * p_norm if self.norm_mode == "paper" else 0.0
        above, below = self.trust_coefficient * p_norm, g_norm + decay_norm + self.eps
        least = xp.minimum(p_norm, g_norm)  # a norm that is NaN is not zero: the ratio is NaN as well
        if self.clip:
            # min(ratio / lr, 1), with no division by an lr of 0
            above, below, least = xp.minimum(above, lr * below), below * lr, xp.minimum(least, lr)
        zero_ratio = self.trust_coefficient if isinstance(self.zero_ratio, str) else self.zero_ratio
        ratio = ratio_unless(xp, least <= 0, above, below, zero_ratio)
        return ratio if self.always_adapt else xp.where(self.weight_decay != 0, ratio, 1.0)
