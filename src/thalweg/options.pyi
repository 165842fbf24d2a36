"""Made by tools/fields.py from the fields of the rules: change those, and run it."""

from typing import Literal, TypedDict

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.given import Overrides
from thalweg.rules import Annealed, Rule, Spikes
from thalweg.signatures import Pair, Schedulable, Triple

__all__: list[str] = [
    "CommonOptions",
    "DType",
    "Pair",
    "Schedulable",
    "StateDType",
    "Triple",
    "SGDOptions",
    "AdamWOptions",
    "LARSOptions",
    "LAMBOptions",
    "AdafactorOptions",
    "MuonOptions",
    "KronOptions",
    "SOAPOptions",
    "AdEMAMixOptions",
    "LionOptions",
    "MARSOptions",
]

class CommonOptions(TypedDict, total=False):
    variant: str | None
    overrides: Overrides
    stacked_axes: int
    graft: Rule | None
    cautious: bool | Literal["decay", "both"]
    schedule_free: float | bool
    schedule_free_warmup: int | None
    averaged: Literal["mean"] | Schedulable | None
    averaged_warmup: bool
    averaged_from: int | None
    maximize: bool
    max_grad_norm: float | None
    on_nonfinite: Literal["propagate", "skip", "raise"]
    rounding: Literal["nearest", "stochastic", "compensated"]
    state_dtype: StateDType | None
    momentum_dtype: StateDType | None
    precond_dtype: DType | None
    state_rounding: Literal["nearest", "stochastic"]
    seed: int
    spikes: bool | Spikes


class SGDOptions(CommonOptions, total=False):
    momentum: Schedulable
    dampening: Schedulable
    weight_decay: Schedulable
    nesterov: bool


class AdamWOptions(CommonOptions, total=False):
    betas: Pair
    eps: Schedulable
    weight_decay: Schedulable
    amsgrad: bool
    nesterov: bool
    decoupled: bool
    eps_root: Schedulable


class LARSOptions(CommonOptions, total=False):
    momentum: Schedulable
    weight_decay: Schedulable
    trust_coefficient: Schedulable
    eps: Schedulable
    nesterov: bool
    trust: bool
    exempt: Literal["vectors"] | None
    always_adapt: bool
    keep_norms: bool
    norm_mode: Literal["paper", "combined"]
    momentum_mode: Literal["lr_inside", "lr_outside"]
    clip: bool
    zero_ratio: Literal["eta"] | Schedulable


class LAMBOptions(CommonOptions, total=False):
    betas: Pair
    eps: Schedulable
    weight_decay: Schedulable
    bias_correction: bool
    grad_averaging: bool
    trust: bool
    exempt: Literal["vectors"] | None
    always_adapt: bool
    keep_norms: bool
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


class MuonOptions(CommonOptions, total=False):
    momentum: Schedulable
    nesterov: bool
    momentum_mode: Literal["ema", "sum"]
    bias_correction: bool
    weight_decay: Schedulable
    cautious_decay: bool
    scaling: Literal["original", "spectral_unclamped", "match_rms_adamw", "optax"] | None
    rms: Schedulable
    split: int | tuple[int, ...]
    split_axis: Literal[0, 1]
    transposed: bool
    ns_steps: int
    ns_coefficients: tuple[float, float, float] | tuple[tuple[float, float, float], ...] | Literal["polar_express", "quintic", "cubic"]
    ns_method: Literal["plain", "gram", "auto"]
    ns_preconditioning: Literal["frobenius", "aol"]
    ns_dtype: Literal["bfloat16", "float32"] | None
    eps: Schedulable
    eps_mode: Literal["floor", "add"]
    normalize: Literal["rows"] | None
    normalize_beta: Schedulable
    vectors: Literal["refuse", "row"]


class KronOptions(CommonOptions, total=False):
    precond_lr: Schedulable
    momentum: Schedulable
    momentum_mode: Literal["polyak", "ema"]
    weight_decay: Schedulable
    weight_decay_mode: Literal["gradient", "update", "decoupled"]
    normalize_grads: bool
    eps: Schedulable
    clip: Schedulable | None
    clip_mode: Literal["value", "rms"]
    precond_update_probability: Annealed | Schedulable
    geometry: Literal["procrustes", "quad", "eq"]
    whiten: Literal["gradient", "momentum"]
    max_size_dense: int | None
    max_skew: float | None
    block_size: int | None
    merge: Literal["matrix", "squeeze"] | None
    init_scale: float | None
    damping: Schedulable
    relative_damping: Schedulable | None
    damping_mode: Literal["noise", "expected"]
    lipschitz_beta: Schedulable


class SOAPOptions(CommonOptions, total=False):
    betas: Pair
    shampoo_beta: Schedulable | None
    eps: Schedulable
    weight_decay: Schedulable
    bias_correction: bool
    precondition_frequency: int
    max_precond_dim: int | None
    one_sided: bool
    block_size: int | None
    merge: Literal["matrix", "squeeze"] | None
    precondition_1d: bool


class AdEMAMixOptions(CommonOptions, total=False):
    betas: Triple
    alpha: Schedulable
    alpha_warmup: Schedulable | None
    beta3_warmup: Schedulable | None
    eps: Schedulable
    weight_decay: Schedulable
    eps_root: Schedulable


class LionOptions(CommonOptions, total=False):
    betas: Pair
    weight_decay: Schedulable


class MARSOptions(CommonOptions, total=False):
    betas: Pair
    eps: Schedulable
    weight_decay: Schedulable
    amsgrad: bool
    nesterov: bool
    decoupled: bool
    eps_root: Schedulable
    gamma: Schedulable
