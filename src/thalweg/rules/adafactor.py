"""Adafactor (Shazeer, Stern 2018, arXiv:1804.04235): factored second moments, sublinear memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State, Value
from thalweg.rules.blocks import average, inverse_sqrt
from thalweg.rules.checks import (
    check_choice,
    check_count,
    check_flag,
    check_fraction,
    check_number,
    check_pair,
    is_known,
    require,
)
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.rule import Noise, Rule, Update


@dataclass(frozen=True, kw_only=True)
class Adafactor(Rule):
    """u = g / sqrt(row average x column average of g**2), clipped by RMS, scaled by RMS(p)."""

    #: New squares get weight t**-abs(beta2_decay); either sign is accepted.
    beta2_decay: Scalar = -0.8
    #: Added to g**2 (or, under eps_mode="clamp", floor of the root), and floor of RMS(p).
    eps: tuple[Scalar, Scalar] = (1e-30, 1e-3)
    #: Largest RMS of u; None: unbounded.
    clip_threshold: Scalar | None = 1.0
    weight_decay: Scalar = 0.0
    #: Step size min(cap, 1/sqrt(t)) with cap = lr, or 1e-2 without one. None: just when lr is None.
    relative_step: bool | None = None
    #: With relative_step: cap = 1e-6 t.
    warmup_init: bool = False
    #: Multiply the step size by RMS(p); "relative": only beside relative_step.
    scale_parameter: bool | Literal["relative"] = True
    momentum: Scalar | None = None
    #: Average the update after its step size has been applied, or before.
    momentum_mode: Literal["after_lr", "before_lr"] = "after_lr"
    #: What scales the decay: the tensor's own step size, lr (or the cap), or nothing.
    weight_decay_mode: Literal["alpha", "lr", "independent"] = "alpha"
    #: Steps to subtract from t in the decay of squares, for fine-tuning.
    decay_offset: Scalar = 0
    #: Largest weight of old squares; None: approaches 1.
    beta2_cap: Scalar | None = None
    eps_mode: Literal["grad_sq", "clamp"] = "grad_sq"
    factored: bool = True
    #: Factor only where both axes have at least this size.
    min_dim_size_to_factor: int = 128
    #: Which two axes to factor: the largest, or the last.
    factor_dims: Literal["largest2", "last2"] = "largest2"
    #: Factor matrices only, never tensors of more axes.
    only_2d: bool = False

    lr_optional: ClassVar[bool] = True
    #: After it torch has eps, whose first number is a floor there, and is added to squares here.
    TORCH: ClassVar[tuple[str, ...]] = ("beta2_decay",)
    VARIANTS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"min_dim_size_to_factor": 0, "only_2d": True, "scale_parameter": "relative"},
        "optax": {"relative_step": False, "weight_decay_mode": "independent"},
        "torch": {
            "relative_step": True,
            "eps": (2.0**-23, 1e-3),
            "eps_mode": "clamp",
            "min_dim_size_to_factor": 0,
            "factor_dims": "last2",
            "weight_decay_mode": "lr",
        },
        # AdamW's rates and decay at a byte a parameter
        "as_adamw": {
            "relative_step": False,
            "scale_parameter": False,
            "beta2_cap": 0.999,
            "momentum": 0.9,
            "momentum_dtype": "int8",
            "momentum_mode": "before_lr",
            "weight_decay_mode": "lr",
        },
        "hf": {"min_dim_size_to_factor": 0, "factor_dims": "last2"},
        "big_vision": {
            "relative_step": False,
            "scale_parameter": False,
            "min_dim_size_to_factor": 32,
            "beta2_cap": 0.999,
            "clip_threshold": None,
            "momentum": 0.9,
            "momentum_dtype": "bfloat16",
            "momentum_mode": "before_lr",
            "weight_decay_mode": "independent",
        },
    }

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        **Rule.ELSEWHERE,
        "decay_rate": "beta2_decay",
        "beta1": "momentum",
        "b1": "momentum",
        "d": "clip_threshold",
        "clipping_threshold": "clip_threshold",
        "eps1": "eps=(eps1, eps2)",
        "eps2": "eps=(eps1, eps2)",
        "eps_scale": "eps=(eps, eps_scale)",
        "multiply_by_parameter_scale": "scale_parameter",
        "beta2_max": "beta2_cap",
    }

    def validate(self) -> None:
        super().validate()
        check_number("beta2_decay", self.beta2_decay)
        require(
            not is_known(self.beta2_decay) or self.beta2_decay != 0,
            "beta2_decay must not be 0: no square would ever be forgotten; the paper has -0.8",
        )
        for index, eps in enumerate(check_pair("eps", self.eps)):
            check_number(f"eps[{index}]", eps, low=0.0)
        if self.clip_threshold is not None:
            check_number("clip_threshold", self.clip_threshold, low=0.0, open_low=True)
        check_number("weight_decay", self.weight_decay, low=0.0)
        check_choice("relative_step", self.relative_step, None, True, False)
        check_choice("scale_parameter", self.scale_parameter, True, False, "relative")
        if self.momentum is not None:
            check_fraction("momentum", self.momentum)
        if self.beta2_cap is not None:
            check_fraction("beta2_cap", self.beta2_cap)
        check_number("decay_offset", self.decay_offset, low=0.0)
        for flag in ("warmup_init", "factored", "only_2d"):
            check_flag(flag, getattr(self, flag))
        check_choice("momentum_mode", self.momentum_mode, "after_lr", "before_lr")
        check_choice("weight_decay_mode", self.weight_decay_mode, "alpha", "lr", "independent")
        check_choice("eps_mode", self.eps_mode, "grad_sq", "clamp")
        if self.eps_mode == "clamp":
            check_number("eps[0] under eps_mode='clamp'", self.eps[0], low=0.0, open_low=True)
        check_choice("factor_dims", self.factor_dims, "largest2", "last2")
        check_count("min_dim_size_to_factor", self.min_dim_size_to_factor)

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        if not self.is_relative(lr):
            idle["warmup_init"] = "relative_step=True"
        elif self.warmup_init:
            idle["lr"] = "warmup_init=False: the cap is 1e-6 t"
        if self.momentum is None:
            idle |= dict.fromkeys(("momentum_mode", "momentum_dtype"), "a momentum")
        if not self.factored:
            idle |= dict.fromkeys(("min_dim_size_to_factor", "factor_dims", "only_2d"), "factored=True")
        return idle

    def is_relative(self, lr: Scalar | None) -> bool:
        return lr is None if self.relative_step is None else self.relative_step

    def treatment(self, shape: Shape) -> str:
        axes = self.factored_axes(shape)
        return "all squares" if axes is None else f"factored over axes {axes[0]} and {axes[1]}"

    def expected_rms(self, lr: float | None, p_rms: float) -> float:
        relative = self.is_relative(lr)
        step = (1e-2 if relative else 1.0) if lr is None else lr
        return step * max(p_rms, self.eps[1]) if self.is_scaled(lr) else step

    def kind(self, shape: Shape) -> Hashable:
        return self.factored_axes(shape), super().kind(shape)

    def factored_axes(self, shape: Shape) -> tuple[int, int] | None:
        """(row axis, column axis) of the statistics of such a tensor, or None for all squares."""
        ndim = len(shape) - self.stacked_axes
        if not self.factored or ndim < 2 or (self.only_2d and ndim != 2):
            return None
        own = list(range(self.stacked_axes, len(shape)))
        if self.factor_dims == "largest2":
            own = sorted(own, key=lambda axis: shape[axis])  # among equals the later axis counts as the larger
        row, column = sorted(own[-2:])
        return None if min(shape[row], shape[column]) < self.min_dim_size_to_factor else (row, column)

    def entries(self, shape: Shape) -> dict[str, Entry]:
        axes = self.factored_axes(shape)
        squares: dict[str, Entry] = {"variance": Square()}
        if axes is not None:
            row, column = axes
            squares = {"row_var": Square(over=(column,)), "col_var": Square(over=(row,))}
        return squares if self.momentum is None else {**squares, "exp_avg": Moment()}

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
        axes = self.own_axes(xp.shape(p))
        weight = self.weight_of_squares(xp, t)
        eps = 0.0 if self.eps_mode == "clamp" else self.eps[0]
        state: State[A]
        if "variance" in s:
            # squares that overflow make u 0 and would go unnoticed, so they are averaged as well
            p_square, overflow = xp.means(Squares(p, axes), Squares(g, axes))
            state = {"variance": average(s["variance"], g * g + eps, weight)}
            u = g * self.inverse_root(xp, state["variance"])
        else:
            axes_of_factors = self.factored_axes(xp.shape(p))
            assert axes_of_factors is not None
            row, column = axes_of_factors
            # the mean of the new row_var follows from this same round of averages
            rows, columns, new_mean, old_mean, p_square = xp.means(
                Squares(g, (column,)),
                Squares(g, (row,)),
                Squares(g, (row, column)),
                (s["row_var"], (row,)),
                Squares(p, axes),
            )
            state = {
                "row_var": average(s["row_var"], rows + eps, weight),
                "col_var": average(s["col_var"], columns + eps, weight),
            }
            u = self.whitened(xp, g, state["row_var"], state["col_var"], average(old_mean, new_mean + eps, weight))
            overflow = 0.0  # shows in u: inf / inf

        (u_square,) = xp.means(Squares(u, axes))
        u_rms, p_rms = xp.sqrt(u_square), xp.sqrt(p_square)
        clip = 1.0 if self.clip_threshold is None else 1 / xp.maximum(u_rms / self.clip_threshold, 1.0)
        nominal, alpha = self.step_size(xp, p_rms, t, lr, lr_scale)

        if self.momentum is None:
            step = u * (alpha * clip)
        elif self.momentum_mode == "after_lr":
            state["exp_avg"] = step = average(s["exp_avg"], u * (alpha * clip), 1 - self.momentum)
        else:
            state["exp_avg"] = average(s["exp_avg"], u * clip, 1 - self.momentum)
            step = state["exp_avg"] * alpha
        decay = {"alpha": alpha, "lr": nominal, "independent": 1.0}[self.weight_decay_mode] * self.weight_decay
        stats = {"update_rms": u_rms, "clip_factor": clip, "param_rms": p_rms, "step_size": alpha}
        return Update(-(step + decay * p), state, xp.isfinite(u_square + overflow), stats)

    def weight_of_squares(self, xp: Space[A], t: Scalar) -> Scalar:
        """The share of this step's squares in their average."""
        weight = xp.maximum(t - self.decay_offset, 1) ** -abs(self.beta2_decay)
        return weight if self.beta2_cap is None else xp.maximum(weight, 1 - self.beta2_cap)

    def step_size(
        self, xp: Space[A], p_rms: Scalar, t: Scalar, lr: Scalar | None, lr_scale: Scalar
    ) -> tuple[Scalar, Scalar]:
        """The nominal step size (lr, or the cap of the relative step) and this tensor's own."""
        nominal, rho = self.rates(xp, t, lr)
        scale = xp.maximum(p_rms, self.eps[1]) if self.is_scaled(lr) else 1.0
        return nominal * lr_scale, rho * scale * lr_scale

    def rates(self, xp: Space[A], t: Scalar, lr: Scalar | None) -> tuple[Scalar, Scalar]:
        """The nominal step size, and that of this step, before a tensor's size comes in."""
        relative = self.is_relative(lr)
        nominal = (1e-2 if relative else 1.0) if lr is None else lr
        if relative and self.warmup_init:
            nominal = 1e-6 * t
        return nominal, xp.minimum(nominal, t**-0.5) if relative else nominal

    def is_scaled(self, lr: Scalar | None) -> bool:
        """Whether the step size follows RMS(p)."""
        return self.is_relative(lr) if self.scale_parameter == "relative" else self.scale_parameter

    def whitened(self, xp: Space[A], g: A, row_var: A, col_var: A, mean: Scalar) -> Value:
        """g over the square root of the factored estimate row_var x col_var / mean."""
        if self.eps_mode == "clamp":
            return g * self.inverse_root(xp, row_var * (col_var / xp.maximum(mean, self.eps[0])))
        return g * inverse_sqrt(xp, row_var / xp.where(mean > 0, mean, 1.0)) * inverse_sqrt(xp, col_var)

    def inverse_root(self, xp: Space[A], variance: A) -> Value:
        if self.eps_mode == "clamp":
            return 1 / xp.maximum(xp.sqrt(variance), self.eps[0])
        return inverse_sqrt(xp, variance)
