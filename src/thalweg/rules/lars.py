"""LARS (You, Gitman, Ginsburg 2017, arXiv:1708.03888): SGD with momentum, step sizes by layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import is_zero, norm_kept, ratio_unless
from thalweg.rules.checks import check_choice, check_flag, check_fraction, check_number
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.exempt import exempted, treatment_of
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class LARS(Rule):
    """Each tensor moves in proportion to its own norm: ratio = eta |p| / (|g| + decay |p|)."""

    momentum: Scalar = 0.9
    weight_decay: Scalar = 0.0
    trust_coefficient: Scalar = 1e-3
    eps: Scalar = 0.0
    nesterov: bool = False
    #: False takes every ratio as 1: SGD with momentum.
    trust: bool = True
    #: "vectors": tensors of fewer than two axes have neither trust ratio nor decay. None: all are alike.
    exempt: Literal["vectors"] | None = None
    #: False adapts only tensors with weight decay, as timm does.
    always_adapt: bool = True
    #: Whether a tensor with a trust ratio keeps its norm: a step turns it, and neither stretches nor shrinks it.
    keep_norms: bool = False
    #: "paper" measures |g| + decay |p|; "combined" measures |g + decay p|.
    norm_mode: Literal["paper", "combined"] = "paper"
    #: Whether the learning rate scales what enters the momentum, or what leaves it.
    momentum_mode: Literal["lr_inside", "lr_outside"] = "lr_inside"
    #: LARC's clipping: the layer's rate never exceeds lr.
    clip: bool = False
    #: The ratio of a tensor that is zero, or whose gradient is; "eta" means trust_coefficient.
    zero_ratio: Scalar | Literal["eta"] = 1.0

    default_lr: ClassVar[float | None] = 1.0

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {},
        "optax": {"norm_mode": "combined"},
        "timm": {"momentum": 0.0, "eps": 1e-8, "momentum_mode": "lr_outside", "always_adapt": False},
        "larc": {"trust_coefficient": 0.02, "eps": 1e-8, "momentum_mode": "lr_outside", "clip": True},
    }

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **Rule.ELSEWHERE,
        "trust_coeff": "trust_coefficient",
        "trust_coef": "trust_coefficient",
        "eta": "trust_coefficient",
        "epsilon": "eps",
        "trust_clip": "clip",
    }

    def validate(self) -> None:
        super().validate()
        check_fraction("momentum", self.momentum)
        check_number("weight_decay", self.weight_decay, low=0.0)
        check_number("trust_coefficient", self.trust_coefficient, low=0.0, open_low=True)
        check_number("eps", self.eps, low=0.0)
        for flag in ("nesterov", "trust", "always_adapt", "keep_norms", "clip"):
            check_flag(flag, getattr(self, flag))
        check_choice("exempt", self.exempt, "vectors", None)
        check_choice("norm_mode", self.norm_mode, "paper", "combined")
        check_choice("momentum_mode", self.momentum_mode, "lr_inside", "lr_outside")
        if isinstance(self.zero_ratio, str):
            check_choice("zero_ratio", self.zero_ratio, "eta")
        else:
            check_number("zero_ratio", self.zero_ratio, low=0.0)

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        if not self.trust:
            needs_trust = ("trust_coefficient", "eps", "norm_mode", "clip", "zero_ratio", "always_adapt", "keep_norms")
            idle |= dict.fromkeys(needs_trust, "trust=True")
        if is_zero(self.momentum):
            idle |= dict.fromkeys(("nesterov", "momentum_mode", "momentum_dtype"), "a momentum above 0")
        return idle

    @property
    def looks_at_shapes(self) -> bool:
        return self.trust

    def for_shape(self, shape: Shape) -> LARS:
        return exempted(self, shape)

    def treatment(self, shape: Shape) -> str:
        return treatment_of(self)

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        return (lr or 0.0) * self.trust_coefficient * p_rms if self.trust else lr or 0.0

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
        lr = lr * lr_scale
        decayed = g + self.weight_decay * p
        measured = decayed if self.norm_mode == "combined" else g
        axes = self.own_axes(xp.shape(p))
        p_squares, g_squares = xp.sums(Squares(p, axes), Squares(measured, axes))
        p_norm, g_norm = xp.sqrt(p_squares), xp.sqrt(g_squares)
        ratio = self.ratio(xp, p_norm, g_norm, lr) if self.trust else 1.0

        step = decayed * (ratio * lr if self.momentum_mode == "lr_inside" else ratio)
        state: State[A] = {}
        if s:
            state["momentum_buffer"] = buffer = self.momentum * s["momentum_buffer"] + step
            step = step + self.momentum * buffer if self.nesterov else buffer
        delta = -step if self.momentum_mode == "lr_inside" else step * -lr
        finite = xp.isfinite(g_squares)
        if self.trust and self.keep_norms:
            (new_squares,) = xp.sums(Squares(p + delta, axes))
            turned = norm_kept(xp, p_norm, new_squares)
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
