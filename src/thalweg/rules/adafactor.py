"""Adafactor (Shazeer, Stern 2018, arXiv:1804.04235): factored second moments, sublinear memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State, Value
from thalweg.rules.blocks import average, inverse_sqrt, is_zero
from thalweg.rules.checks import check_number, is_known, require
from thalweg.rules.entries import Entry, Moment, Square
from thalweg.rules.options import Mask, option
from thalweg.rules.rule import Rule, Update


@dataclass(frozen=True, kw_only=True)
class Adafactor(Rule):
    """u = g / sqrt(row average x column average of g**2), clipped by RMS, scaled by RMS(p)."""

    beta2_decay: Scalar = option(
        -0.8,
        "New squares get weight t to the power -abs(beta2_decay). Either sign is accepted; not 0.",
        elsewhere="decay_rate",
    )
    eps: tuple[Scalar, Scalar] = option(
        (1e-30, 1e-3),
        "Added to g² (see `eps_mode`), and least value of RMS(p).",
        low=0,
        elsewhere={"eps1": "eps=(eps1, eps2)", "eps2": "eps=(eps1, eps2)", "eps_scale": "eps=(eps, eps_scale)"},
    )
    clip_threshold: Scalar | None = option(
        1.0, "The largest RMS of u; `None`: no limit.", above=0, elsewhere="d clipping_threshold"
    )
    weight_decay: Scalar = option(0.0, "See `weight_decay_mode`.", low=0)
    relative_step: bool | None = option(
        None, "Step size min(cap, 1/sqrt(t)), with `lr`, or 1e-2, as the cap. `None`: where `lr` is `None`."
    )
    warmup_init: bool = option(False, "With the relative step: the cap is 1e-6 t, and `lr` must be `None`.")
    scale_parameter: bool | Literal["relative"] = option(
        True,
        "Multiply the step size by RMS(p). `'relative'`: only with the relative step.",
        elsewhere="multiply_by_parameter_scale",
    )
    momentum: Scalar | None = option(
        None,
        "Decay of the first moment, which has no bias correction. `None` keeps none.",
        low=0,
        below=1,
        stores="momentum_dtype",
        elsewhere="beta1 b1",
    )
    momentum_mode: Literal["after_lr", "before_lr"] = option(
        "after_lr",
        "Average the update after its step size has been applied, or (`'before_lr'`) before.",
        needs="momentum",
    )
    weight_decay_mode: Literal["alpha", "lr", "independent"] = option(
        "alpha",
        "What scales the decay: `'alpha'` the tensor's own step size, `'lr'` the nominal one, `'independent'` nothing.",
    )
    decay_offset: Scalar = option(0, "Steps subtracted from t in `weight`, for fine-tuning.", low=0)
    beta2_cap: Scalar | None = option(
        None, "Largest weight of old squares. `None`: approaches 1.", low=0, below=1, elsewhere="beta2_max"
    )
    eps_mode: Literal["grad_sq", "clamp"] = option(
        "grad_sq", "Add `eps[0]` to g², or (`'clamp'`, as torch) use it as a floor of the root."
    )
    factored: bool = option(True, "`False` keeps all squares of all tensors.")
    min_dim_size_to_factor: int = option(
        128, "Factor only where both axes have at least this size.", low=0, needs="factored"
    )
    factor_dims: Literal["largest2", "last2"] = option(
        "largest2",
        "The two axes to factor: the two largest (of equal ones, the later), or `'last2'`.",
        needs="factored",
    )
    only_2d: bool = option(False, "Factor matrices only, never tensors of more axes.", needs="factored")

    lr_optional = True
    typical_lr = 0.1
    is_decay_apart = True
    #: After it torch has eps, whose first number is a floor there, and is added to squares here.
    TORCH = ("beta2_decay",)
    VARIANTS = {
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

    OPTAX = {
        **{"min_dim_size_to_factor": "min_dim_size_to_factor", "decay_rate": ("beta2_decay", 0.8)},
        **{"decay_offset": "decay_offset", "multiply_by_parameter_scale": "scale_parameter"},
        **{"clipping_threshold": "clip_threshold", "momentum": "momentum"},
        **{"dtype_momentum": ("momentum_dtype", "float32"), "weight_decay_rate": ("weight_decay", None)},
        **{"eps": "eps[0]", "factored": "factored", "weight_decay_mask": Mask("weight_decay")},
        **{"*": "", "min_scale": "eps[1]"},
    }

    def validate(self) -> None:
        super().validate()
        require(
            not is_known(self.beta2_decay) or self.beta2_decay != 0,
            "beta2_decay must not be 0: no square would ever be forgotten; the paper has -0.8",
        )
        if self.eps_mode == "clamp":
            check_number("eps[0] under eps_mode='clamp'", self.eps[0], low=0.0, open_low=True)

    def idle(self, lr: Scalar | None) -> dict[str, str]:
        idle = super().idle(lr)
        if not self.is_relative(lr):
            idle["warmup_init"] = "relative_step=True"
        elif self.warmup_init:
            idle["lr"] = "warmup_init=False: the cap is 1e-6 t"
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
        axes = list(range(self.stacked_axes, len(shape)))
        if self.factor_dims == "largest2":
            axes = sorted(axes, key=lambda axis: shape[axis])  # among equals the later axis counts as the larger
        row, column = sorted(axes[-2:])
        return None if min(shape[row], shape[column]) < self.min_dim_size_to_factor else (row, column)

    def entries(self, shape: Shape) -> dict[str, Entry]:
        axes = self.factored_axes(shape)
        squares: dict[str, Entry] = {"variance": Square()}
        if axes is not None:
            row, column = axes
            squares = {"row_var": Square(over=(column,)), "col_var": Square(over=(row,))}
        return squares if self.momentum is None else {**squares, "exp_avg": Moment()}

    def update(self, xp, g, s, p, *, t, lr, lr_scale=1.0, noise=None) -> Update:
        axes = self.own_axes(xp.shape(p))
        weight = self.weight_of_squares(xp, t)
        eps = 0.0 if self.eps_mode == "clamp" else self.eps[0]
        state: State[Any]
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
        direction = u if self.momentum is None else step
        return Update(-(step + decay * p), state, xp.isfinite(u_square + overflow), stats, direction)

    def decay_share(self, xp, update, *, t, lr, lr_scale) -> Scalar:
        sizes = {"alpha": update.stats["step_size"], "lr": self.rates(xp, t, lr)[0] * lr_scale, "independent": 1.0}
        return 0.0 if is_zero(self.weight_decay) else sizes[self.weight_decay_mode] * self.weight_decay

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
