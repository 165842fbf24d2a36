"""Options beside those that optax has, as types for editors and type checkers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypedDict

from thalweg.rules import Annealed

#: A number, an array of jax, or a schedule: a function of the count of steps taken, from 0.
Schedulable: TypeAlias = Any
#: A tree of truth values with the structure of the parameters or a prefix of it, or a function that makes one.
Mask: TypeAlias = Any
DType: TypeAlias = Any


class CommonExtras(TypedDict, total=False):
    maximize: bool
    max_grad_norm: float | None
    on_nonfinite: Literal["propagate", "skip"]
    rounding: Literal["nearest", "stochastic", "compensated"]
    state_dtype: DType | None
    state_rounding: Literal["nearest", "stochastic"]
    seed: int | None


class SgdExtras(CommonExtras, total=False):
    dampening: Schedulable
    weight_decay: Schedulable


class AdamwExtras(CommonExtras, total=False):
    amsgrad: bool
    decoupled: bool


class LarsExtras(CommonExtras, total=False):
    trust: bool
    exempt: Literal["vectors"] | None
    always_adapt: bool
    keep_norms: bool
    norm_mode: Literal["paper", "combined"]
    momentum_mode: Literal["lr_inside", "lr_outside"]
    clip: bool
    zero_ratio: Schedulable | Literal["eta"]
    momentum_dtype: DType | None


class LambExtras(CommonExtras, total=False):
    bias_correction: bool
    grad_averaging: bool
    trust: bool
    exempt: Literal["vectors"] | None
    always_adapt: bool
    keep_norms: bool
    trust_clip: tuple[Any, Any] | None
    phi: tuple[Any, Any] | None
    weight_decay_mode: Literal["in_update", "decoupled", "l2"]
    momentum_dtype: DType | None


class AdafactorExtras(CommonExtras, total=False):
    relative_step: bool
    warmup_init: bool
    momentum_mode: Literal["after_lr", "before_lr"]
    weight_decay_mode: Literal["alpha", "lr", "independent"]
    beta2_cap: Schedulable | None
    eps_mode: Literal["grad_sq", "clamp"]
    factor_dims: Literal["largest2", "last2"]
    only_2d: bool


class MuonExtras(CommonExtras, total=False):
    momentum_mode: Literal["ema", "sum"]
    bias_correction: bool
    scaling: Literal["original", "match_rms_adamw", "optax"] | None
    split: int | tuple[int, ...]
    split_axis: Literal[0, 1]
    transposed: bool
    ns_dtype: DType | None
    eps_mode: Literal["floor", "add"]
    vectors: Literal["refuse", "row"]


class KronExtras(CommonExtras, total=False):
    precond_lr: Schedulable
    momentum: Schedulable
    momentum_mode: Literal["polyak", "ema"]
    weight_decay: Schedulable
    weight_decay_mode: Literal["gradient", "update", "decoupled"]
    eps: Schedulable
    clip: Schedulable | None
    clip_mode: Literal["value", "rms"]
    precond_update_probability: float | Annealed | Callable[[Any], Any]
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
    momentum_dtype: DType | None
    precond_dtype: DType | None
    # as psgd-jax calls them
    b1: Schedulable
    preconditioner_lr: Schedulable
    preconditioner_update_probability: float | Callable[[Any], Any]
    preconditioner_init_scale: float
    max_size_triangular: int
    mu_dtype: DType | None
    scanned_layers: Any
