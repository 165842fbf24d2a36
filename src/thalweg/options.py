"""The options of each optimizer as types, for editors and type checkers, and as signatures, for ``inspect``.

The values, defaults and meanings are the fields of ``thalweg.rules`` and of ``thalweg.settings.Handling``. Signatures
are made of them; types are written here, and a test holds the two together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, get_args, get_type_hints

from thalweg.dtypes import Name as DType
from thalweg.rules import RULES, Annealed
from thalweg.settings import Handling, Overrides

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
C = TypeVar("C", bound=type[Any])


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
    precond_update_probability: Annealed | Schedulable  # in this order: jsonargparse takes all else for a function
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


def defaults(rule_name: str) -> dict[str, Any]:
    """Every option of a rule and around it, with its default."""
    return {f.name: f.default for kind in (RULES[rule_name], Handling) for f in fields(kind)}


def with_signature(cls: C) -> C:
    """Show every option of an optimizer, with its type and default, where Python is asked for a signature.

    It is that of the constructor and not of the class: classes that derive from it have their own.
    """
    base: Any = cls.__mro__[1]
    arguments = inspect.signature(base.__init__).parameters.values()
    inherited = {p.name: p.default for p in arguments if p.kind is inspect.Parameter.KEYWORD_ONLY}
    cls.__init__.__signature__ = shown(cls.__init__, {**defaults(cls.rule_name), **inherited})
    return cls


def shown(function: Callable[..., Any], options: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a function with each of its ``**options`` by name. options: these, with their defaults."""
    hints = get_type_hints(function)
    (typed,) = get_args(hints["options"]) or (hints["options"],)
    types = {**get_type_hints(typed), **hints}
    keyword = inspect.Parameter.KEYWORD_ONLY
    named = {name: inspect.Parameter(name, keyword, default=v, annotation=Any) for name, v in options.items()}
    named |= {p.name: p for p in inspect.signature(function).parameters.values() if p.name != "options"}
    parameters = [p.replace(annotation=types.get(name, p.annotation)) for name, p in named.items()]
    returned = None if hints["return"] is type(None) else hints["return"]
    return inspect.Signature(sorted(parameters, key=lambda p: p.kind), return_annotation=returned)
