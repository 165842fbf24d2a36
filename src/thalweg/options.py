"""The options of each optimizer as types, for editors and type checkers, and as signatures, for ``inspect``.

The values, defaults and meanings are the fields of ``thalweg.rules`` and of ``thalweg.settings.Handling``. Signatures
are made of them; types are written here, and a test holds the two together.
"""

from __future__ import annotations

import copyreg
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, get_args, get_type_hints

from thalweg.dtypes import Name as DType
from thalweg.dtypes import StateName as StateDType
from thalweg.overrides import Overrides
from thalweg.rules import RULES, Annealed, Rule
from thalweg.rules.rule import number_options
from thalweg.settings import Handling

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


class CommonOptions(TypedDict, total=False):
    variant: str | None
    overrides: Overrides
    stacked_axes: int
    maximize: bool
    max_grad_norm: float | None
    on_nonfinite: Literal["propagate", "skip", "raise"]
    rounding: Literal["nearest", "stochastic", "compensated"]
    state_dtype: StateDType | None
    momentum_dtype: StateDType | None
    precond_dtype: DType | None
    state_rounding: Literal["nearest", "stochastic"]
    seed: int


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


class LionOptions(CommonOptions, total=False):
    betas: Pair
    weight_decay: Schedulable


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
    zero_ratio: Schedulable | Literal["eta"]


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
    scaling: Literal["original", "match_rms_adamw", "optax"] | None
    rms: Schedulable
    split: int
    split_axis: Literal[0, 1]
    ns_steps: int
    ns_coefficients: tuple[float, float, float] | tuple[tuple[float, float, float], ...]
    ns_dtype: Literal["bfloat16", "float32"] | None
    eps: Schedulable
    eps_mode: Literal["floor", "add"]
    vectors: Literal["refuse", "row"]


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


def defaults(rule: type[Rule]) -> dict[str, Any]:
    """Every option of a rule and around it, with its default."""
    return {f.name: f.default for kind in (rule, Handling) for f in fields(kind)}


def types_of(rule: type[Rule]) -> dict[str, Any]:
    """The types of all options: as they are written above, or else as the rule's fields have them."""
    written = globals().get(f"{rule.__name__}Options") if RULES.get(rule.__name__) is rule else None
    return get_type_hints(written or CommonOptions) if written else {**get_type_hints(CommonOptions), **own_types(rule)}


def own_types(rule: type[Rule]) -> dict[str, Any]:
    try:
        hints = get_type_hints(rule, localns={"Scalar": Schedulable})
    except (NameError, TypeError):  # of names that are known where the rule was written, and not here
        hints = {}
    found = {f.name: hints.get(f.name, Any) for f in fields(rule)}
    pairs = (tuple[Schedulable, Schedulable], tuple[float, float])
    numbers = number_options(rule)
    found |= {name: Schedulable for name, hint in found.items() if hint is float and name in numbers}
    return {name: Pair if hint in pairs else hint for name, hint in found.items()}


def made(rule: type[Rule], base: type[Any], maker: Callable[[type[Rule]], Any]) -> Any:
    """The class of optimizers that derives from a base and steps by a rule, with the rule's options in its signature.

    The signature is that of the constructor and not of the class: classes that derive from it have their own.
    maker: the function that makes it of the rule.
    """
    shipped = RULES.get(rule.__name__) is rule
    arguments = list(inspect.signature(base.__init__).parameters.values())
    lr_given = rule.default_lr is not None or rule.lr_optional
    either, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    by_position = rule.TORCH if any(p.kind is p.VAR_POSITIONAL for p in arguments) else ()
    beside = {p.name: p.default for p in arguments if p.kind is keyword}
    options = {**dict.fromkeys(by_position), **defaults(rule), **beside}
    types = {**types_of(rule), **get_type_hints(base.__init__)}
    parameters = [
        p.replace(default=rule.default_lr) if p.name == "lr" and lr_given else p for p in arguments if p.kind is either
    ]
    parameters += [
        inspect.Parameter(name, either if name in by_position else keyword, default=value)
        for name, value in options.items()
    ]
    parameters = [p if p.name == "self" else p.replace(annotation=types.get(p.name, Any)) for p in parameters]
    before_lr = [p.name for p in parameters if p.name != "self"].index("lr")

    def constructor(self: Any, *given: Any, **options: Any) -> None:
        if len(given) <= before_lr:
            options.setdefault("lr", rule.default_lr)
        base.__init__(self, *given, **options)

    constructor.__name__, constructor.__qualname__ = "__init__", f"{rule.__name__}.__init__"
    constructor.__annotations__ = {p.name: p.annotation for p in parameters if p.name != "self"} | {"return": None}
    constructor.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
    page = f" Options: docs/{rule.__name__.lower()}.md." if shipped else ""
    body = {
        "rule": rule,
        "maker": staticmethod(maker),
        "__init__": constructor,
        "__doc__": f"{inspect.getdoc(rule) or rule.__name__}{page}",
        "__module__": maker.__module__ if shipped else rule.__module__,
        "__qualname__": rule.__name__ if shipped else f"optimizer({rule.__qualname__})",
    }
    return (type if shipped else Made)(rule.__name__, (base,), body)


class Made(ABCMeta):
    """The type of classes made of rules that no module of ours has: a pickle names the rule, and makes them again.

    It is one of abstract classes, so that they can be mixed with such.
    """

    rule: type[Rule]
    maker: Callable[[type[Rule]], Any]


def pickled(cls: Made) -> Any:
    return (cls.maker, (cls.rule,)) if "maker" in vars(cls) else cls.__qualname__


copyreg.pickle(Made, pickled)


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
