"""AdEMAMix (Pagliardini, Ablin, Grangier 2024, arXiv:2409.03137): AdamW with a second, slow average of gradients."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import A, Scalar, Shape, Space, Squares
from thalweg.rules.blocks import average, is_zero, one_minus_power
from thalweg.rules.checks import require
from thalweg.rules.entries import Entry, Moment, SlowMoment, Square
from thalweg.rules.options import Mask, option
from thalweg.rules.rule import Rule, Update


@dataclass(frozen=True, kw_only=True)
class AdEMAMix(Rule):
    """Adam's direction, with alpha times a slow average of gradients added to the fast one; decay is apart."""

    betas: tuple[Scalar, Scalar, Scalar] = option(
        (0.9, 0.999, 0.9999),
        "Decay rates of the fast average, of the second moment, and of the slow average.",
        low=0,
        below=1,
        elsewhere=dict.fromkeys(("beta1", "beta2", "beta3", "b1", "b2", "b3"), "betas=(beta1, beta2, beta3)"),
    )
    alpha: Scalar = option(5.0, "Weight of the slow average beside the fast one.", low=0)
    alpha_warmup: Scalar | None = option(
        None,
        "Steps in which `alpha` grows from 0, in proportion to t. `None`: it is there from the first step.",
        above=0,
        elsewhere={
            "t_alpha": "",
            "t_alpha_beta3": "alpha_warmup=t_alpha_beta3, beta3_warmup=t_alpha_beta3",
        },
    )
    beta3_warmup: Scalar | None = option(
        None,
        "Steps in which the third decay rate grows from `betas[0]`; the half-life of the slow average grows in "
        "proportion to t. `None`: it is there from the first step.",
        above=0,
        elsewhere="t_beta3",
    )
    eps: Scalar = option(1e-8, "Added to the root of the second moment.", low=0, elsewhere="epsilon")
    weight_decay: Scalar = option(
        0.0, "Decoupled decay: p shrinks by `lr * weight_decay` of itself in each step.", low=0
    )
    eps_root: Scalar = option(0.0, "Added to the second moment, under the root.", low=0)

    default_lr = 1e-3
    typical_lr = 0.01
    looks_at_shapes = False
    is_decay_apart = True
    VARIANTS = {"apple": {"alpha": 2.0}, "optax": {}}
    OPTAX = {
        **{"b1": "betas[0]", "b2": "betas[1]", "b3": "betas[2]", "alpha": "alpha", "eps": "eps"},
        **{"eps_root": "eps_root", "mu_dtype": "momentum_dtype", "weight_decay": "weight_decay"},
        "mask": Mask("weight_decay"),
    }

    def validate(self) -> None:
        super().validate()
        has_half_life = self.beta3_warmup is None or not is_zero(self.betas[2])
        require(has_half_life, "beta3_warmup needs a betas[2] above 0: an average that forgets all has no half-life")

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment(), "exp_avg_slow": SlowMoment(), "exp_avg_sq": Square()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        b1, b2, _ = self.betas
        m, v = average(s["exp_avg"], g, 1 - b1), average(s["exp_avg_sq"], g * g, 1 - b2)
        slow = average(s["exp_avg_slow"], g, self.slow_weight(xp, t))
        alpha = self.alpha if self.alpha_warmup is None else self.alpha * xp.minimum(t / self.alpha_warmup, 1)
        # the slow average has no bias correction: it is to gain its weight slowly
        mean = m / one_minus_power(xp, b1, t) + alpha * slow
        u = mean / (xp.sqrt(v / one_minus_power(xp, b2, t) + self.eps_root) + self.eps)
        axes = self.own_axes(xp.shape(p))
        u_squares, g_squares = xp.sums(Squares(u, axes), Squares(g, axes))
        stats = {"update_norm": xp.sqrt(u_squares), "grad_norm": xp.sqrt(g_squares)}
        state = {"exp_avg": m, "exp_avg_slow": slow, "exp_avg_sq": v}
        # a g * g that overflows leaves u finite and v stuck at infinity, so both sums are asked
        delta = (u + self.weight_decay * p) * (-lr * lr_scale)
        return Update(delta, state, xp.isfinite(u_squares + g_squares), stats, mean)

    def slow_weight(self, xp: Space[A], t: Scalar) -> Scalar:
        """What a new gradient weighs in the slow average: 1 - beta3, without cancellation during the warm-up."""
        fast, _, slow = self.betas
        if self.beta3_warmup is None:
            return 1 - slow
        progress = xp.minimum(t / self.beta3_warmup, 1)
        # half-lives are log(1/2) / log(beta), and go from one to the other in a straight line
        return -xp.expm1(1 / ((1 - progress) / xp.log(fast) + progress / xp.log(slow)))
