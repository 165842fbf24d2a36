"""LAMB (You et al. 2020, arXiv:1904.00962): Adam's direction, rescaled layer by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import clip, one_minus_power, ratio_unless, regained
from thalweg.rules.checks import check_bounds, check_choice, check_flag, check_fraction, check_number, check_pair
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.exempt import exempted, treatment_of
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class LAMB(Rule):
    """u = Adam's direction + decay p; each tensor moves by lr |p| along u / |u|."""

    betas: tuple[Scalar, Scalar] = (0.9, 0.999)
    eps: Scalar = 1e-6
    weight_decay: Scalar = 0.0
    bias_correction: bool = True
    #: False gives new gradients weight 1 instead of 1 - b1.
    grad_averaging: bool = True
    #: False takes every ratio as 1: AdamW.
    trust: bool = True
    #: "vectors": tensors of fewer than two axes have neither trust ratio nor decay. None: all are alike.
    exempt: Literal["vectors"] | None = "vectors"
    #: False adapts only tensors with weight decay, as apex and timm do.
    always_adapt: bool = True
    #: (low, high) for the trust ratio.
    trust_clip: tuple[Scalar, Scalar] | None = None
    #: (low, high) for |p| before it enters the ratio.
    phi: tuple[Scalar, Scalar] | None = None
    #: Whether a tensor with a trust ratio keeps its norm: a step turns it, and neither stretches nor shrinks it.
    keep_norms: bool = False
    #: Added to the second moment under the square root.
    eps_root: Scalar = 0.0
    #: Decay as part of u, apart from it ("decoupled"), or as part of the gradient ("l2").
    weight_decay_mode: Literal["in_update", "decoupled", "l2"] = "in_update"

    default_lr: ClassVar[float | None] = 1e-3
    first_default: ClassVar[str | None] = "paper"

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"exempt": None},
        "optax": {"exempt": None},
        "apex": {"exempt": None, "weight_decay": 0.01, "always_adapt": False, "max_grad_norm": 1.0},
        "nvlamb": {"exempt": None, "weight_decay": 0.01, "max_grad_norm": 1.0},
        "lambc": {"exempt": None, "weight_decay": 0.01, "max_grad_norm": 1.0, "trust_clip": (0.0, 1.0)},
    }

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **Rule.ELSEWHERE,
        "beta1": "betas=(beta1, beta2)",
        "beta2": "betas=(beta1, beta2)",
        "b1": "betas=(b1, b2)",
        "b2": "betas=(b1, b2)",
        "epsilon": "eps",
        "adam": "trust=False",
        "use_nvlamb": "always_adapt",
        "adam_w_mode": "weight_decay_mode='in_update', or 'l2'",
        "decouple_weight_decay": "weight_decay_mode='decoupled'",
        "decoupled_decay": "weight_decay_mode='decoupled'",
        "debias": "bias_correction",
        "correct_bias": "bias_correction",
        "clamp_value": "phi=(0, clamp_value)",
    }

    def validate(self) -> None:
        super().validate()
        for index, beta in enumerate(check_pair("betas", self.betas)):
            check_fraction(f"betas[{index}]", beta)
        for name in ("eps", "eps_root", "weight_decay"):
            check_number(name, getattr(self, name), low=0.0)
        for flag in ("bias_correction", "grad_averaging", "trust", "always_adapt", "keep_norms"):
            check_flag(flag, getattr(self, flag))
        check_bounds("trust_clip", self.trust_clip)
        check_bounds("phi", self.phi)
        check_choice("exempt", self.exempt, "vectors", None)
        check_choice("weight_decay_mode", self.weight_decay_mode, "in_update", "decoupled", "l2")

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        needs_trust = ("trust_clip", "phi", "always_adapt", "keep_norms")
        return idle if self.trust else idle | dict.fromkeys(needs_trust, "trust=True")

    @property
    def looks_at_shapes(self) -> bool:
        return self.trust

    def for_shape(self, shape: Shape) -> LAMB:
        return exempted(self, shape)

    def treatment(self, shape: Shape) -> str:
        return treatment_of(self)

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        return (lr or 0.0) * p_rms if self.trust else lr or 0.0

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment(), "exp_avg_sq": Square()}

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
        kept = 1 - decay
        ratio = self.ratio(xp, xp.abs(kept) * p_norm, u_norm) if self.trust else 1.0
        move = ratio * lr
        if keeps:
            # what a step takes from |p|^2, as a part of it, follows from the sums above: memory is not read once more
            unit = xp.where(p_norm <= 0, 1.0, p_norm)
            shared, length = move / unit * (products[0] / unit), move * u_norm / unit
            lost = xp.where(p_norm <= 0, 0.0, decay * (2 - decay) + 2 * kept * shared - length * length)
            turned, more = regained(xp, lost)
            delta = (more * kept - decay) * p - (turned * move) * u
        else:
            delta = u * -move
            if self.weight_decay_mode == "decoupled":
                delta = delta - decay * p
        stats = {"trust_ratio": ratio, "param_norm": p_norm, "update_norm": u_norm, "grad_norm": xp.sqrt(g_squares)}
        # a g * g that overflows leaves u finite and v stuck at infinity, so both sums are asked
        return Update(delta, {"exp_avg": m, "exp_avg_sq": v}, xp.isfinite(u_squares + g_squares), stats)

    def ratio(self, xp: Space[A], p_norm: Scalar, u_norm: Scalar) -> Scalar:
        """The trust ratio, from the two norms; 1 where either is zero."""
        if self.phi is not None:
            p_norm = clip(xp, p_norm, self.phi)
        ratio = ratio_unless(xp, xp.minimum(p_norm, u_norm) <= 0, p_norm, u_norm, 1.0)
        if self.trust_clip is not None:
            ratio = clip(xp, ratio, self.trust_clip)
        return ratio if self.always_adapt else xp.where(self.weight_decay != 0, ratio, 1.0)
