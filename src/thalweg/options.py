"""The options of each optimizer as types, for editors and type checkers.

The values, defaults and meanings are the fields of ``thalweg.rules`` and of
``thalweg.settings.Handling``; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from thalweg.rules import Annealed
from thalweg.settings import Overrides

if TYPE_CHECKING:
    from typing_extensions import Unpack as Unpack
else:
    try:
        from typing import Unpack
    except ImportError:  # Python 3.10
        try:
            from typing_extensions import Unpack
        except ImportError:

            class Unpack:
                """What stands for it at run time where there is none: the options themselves."""

                def __class_getitem__(cls, options: Any) -> Any:
                    return options


#: A number, or a function of the step (counted from 1).
Schedulable: TypeAlias = float | Callable[[int], Any]
Pair: TypeAlias = tuple[float, float] | Callable[[int], Any]
DType: TypeAlias = Literal["float32", "float64", "bfloat16", "float16"]


class CommonOptions(TypedDict, total=False):
    variant: str | None
    overrides: Overrides
    stacked_axes: int
    maximize: bool
    max_grad_norm: float | None
    on_nonfinite: Literal["propagate", "skip", "raise"]
    rounding: Literal["nearest", "stochastic"]
    state_dtype: DType | None
    momentum_dtype: DType | None
    precond_dtype: DType | None
    seed: int


class LARSOptions(CommonOptions, total=False):
    momentum: Schedulable
    weight_decay: Schedulable
    trust_coefficient: Schedulable
    eps: Schedulable
    nesterov: bool
    trust: bool
    always_adapt: bool
    norm_mode: Literal["paper", "combined"]
    momentum_mode: Literal["lr_inside", "lr_outside"]
    clip: bool
    zero_ratio: Schedulable | Literal["eta"]


class LAMBOptions(CommonOptions, total=False):
    betas: Pair
    eps: Schedulable
    weight_decay: Schedulable
    bias_correction: bool
    grad_averaging: bool
    trust: bool
    always_adapt: bool
    trust_clip: Pair | None
    phi: Pair | None
    eps_root: Schedulable
    weight_decay_mode: Literal["in_update", "decoupled", "l2"]


class AdafactorOptions(CommonOptions, total=False):
    beta2_decay: Schedulable
    eps: Pair
    clip_threshold: Schedulable | None
    weight_decay: Schedulable
    relative_step: bool | None
    warmup_init: bool
    scale_parameter: bool | Literal["relative"]
    momentum: Schedulable | None
    momentum_mode: Literal["after_lr", "before_lr"]
    weight_decay_mode: Literal["alpha", "lr", "independent"]
    decay_offset: Schedulable
    beta2_cap: Schedulable | None
    eps_mode: Literal["grad_sq", "clamp"]
    factored: bool
    min_dim_size_to_factor: int
    factor_dims: Literal["largest2", "last2"]
    only_2d: bool


class KronOptions(CommonOptions, total=False):
    precond_lr: Schedulable
    momentum: Schedulable
    momentum_mode: Literal["polyak", "ema"]
    weight_decay: Schedulable
    weight_decay_mode: Literal["gradient", "update", "decoupled"]
    eps: Schedulable
    clip: Schedulable | None
    clip_mode: Literal["value", "rms"]
    precond_update_probability: Schedulable | Annealed
    geometry: Literal["procrustes", "quad", "eq"]
    whiten: Literal["gradient", "momentum"]
    max_size_dense: int | None
    max_skew: float | None
    merge: Literal["matrix", "squeeze"] | None
    init_scale: float | None
    damping: Schedulable
    relative_damping: Schedulable | None
    damping_mode: Literal["noise", "expected"]
    lipschitz_beta: Schedulable
