"""AdamW (Loshchilov, Hutter 2019, arXiv:1711.05101) and Adam (Kingma, Ba 2015, arXiv:1412.6980)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.rules.blocks import average, one_minus_power
from thalweg.rules.checks import check_flag, check_fraction, check_number, check_pair
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class AdamW(Rule):
    """The average of gradients over the root of the average of their squares, and decay apart from both."""

    betas: tuple[Scalar, Scalar] = (0.9, 0.999)
    eps: Scalar = 1e-8
    weight_decay: Scalar = 0.01
    #: Divides by the largest average of squares so far.
    amsgrad: bool = False
    #: Looks ahead by one step, as optax does: NAdamW.
    nesterov: bool = False
    #: False makes decay a part of the gradient: Adam with L2.
    decoupled: bool = True
    #: Added to the second moment under the square root.
    eps_root: Scalar = 0.0

    default_lr: ClassVar[float | None] = 1e-3

    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {"torch": {}, "optax": {"weight_decay": 1e-4}}

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **Rule.ELSEWHERE,
        "beta1": "betas=(beta1, beta2)",
        "beta2": "betas=(beta1, beta2)",
        "b1": "betas=(b1, b2)",
        "b2": "betas=(b1, b2)",
        "epsilon": "eps",
        "decoupled_weight_decay": "decoupled",
    }

    TORCH: ClassVar[tuple[str, ...]] = ("betas", "eps", "weight_decay", "amsgrad")
    OPTAX: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "b1": ("betas[0]", 0.9),
        "b2": ("betas[1]", 0.999),
        "eps": ("eps", 1e-8),
        "eps_root": ("eps_root", 0.0),
        "mu_dtype": ("momentum_dtype", None),
        "weight_decay": ("weight_decay", 1e-4),
        "mask": ("", None),
        "*": ("", None),
        "nesterov": ("nesterov", False),
    }

    def validate(self) -> None:
        super().validate()
        for index, beta in enumerate(check_pair("betas", self.betas)):
            check_fraction(f"betas[{index}]", beta)
        for name in ("eps", "eps_root", "weight_decay"):
            check_number(name, getattr(self, name), low=0.0)
        for flag in ("amsgrad", "nesterov", "decoupled"):
            check_flag(flag, getattr(self, flag))

    @property
    def looks_at_shapes(self) -> bool:
        return False

    def entries(self, shape: Shape) -> dict[str, Entry]:
        largest: dict[str, Entry] = {"max_exp_avg_sq": Square()} if self.amsgrad else {}
        return {"exp_avg": Moment(), "exp_avg_sq": Square(), **largest}

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
        return Update(delta, state, xp.isfinite(u_squares + g_squares), stats)
