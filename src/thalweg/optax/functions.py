"""Gradient transformations made of rules: one function for each rule, with the names, defaults and numbers of optax."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import optax
from jax import numpy as jnp

from thalweg.errors import OptionError
from thalweg.given import Overrides, check_known, differ, is_list
from thalweg.optax.engines import Engine
from thalweg.optax.matrices import declare_layout
from thalweg.optax.transformation import as_transformation, without_where_false
from thalweg.optax.values import dtype_name, join
from thalweg.rules import RULES, Rule
from thalweg.rules.checks import require
from thalweg.rules.exempt import EXEMPT
from thalweg.rules.options import Mask, options_of
from thalweg.settings import defaults, numbers_of, option_names
from thalweg.signatures import types_of
from thalweg.trial import check_rule

#: In ``Rule.OPTAX``: what follows is by keyword alone.
KEYWORDS = "*"
#: What every function takes beside options.
BESIDE: Mapping[str, Any] = {"overrides": (), "stacked_axes": None, "specs": None, "engine": "auto"}


#: Arguments that this front end adds to those of a rule, with their defaults.
ADDED: Mapping[str, Mapping[str, Any]] = {"Muon": {"layout": None}}


def transformation(
    rule: type[Rule],
    learning_rate: Any = None,
    *,
    variant: str | None = None,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
    engine: Engine = "auto",
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """A rule as a gradient transformation, with the rule's options by name.

    learning_rate: a number, an array or a schedule, a function of the count of steps from 0; so may options be that
    are numbers. stacked_axes: a number for all leaves, or a tree of them.

    >>> import jax.numpy as jnp
    >>> from thalweg.rules import LAMB
    >>> solver = transformation(LAMB, learning_rate=0.1, weight_decay=0.0)
    >>> params = jnp.ones((2, 2))
    >>> updates, state = solver.update(jnp.full((2, 2), 0.5), solver.init(params), params)
    >>> print(params + updates)
    [[0.9 0.9]
     [0.9 0.9]]
    """
    check_rule(rule)
    check_known(rule, options, option_names(rule))
    learning_rate = rule.default_lr if learning_rate is None else learning_rate
    beside: dict[str, Any] = dict(overrides=overrides, stacked_axes=stacked_axes, specs=specs, engine=engine)
    return as_transformation(rule, learning_rate, options, variant=variant, **beside)


# ---- the arguments of a function


@dataclass(frozen=True)
class Argument:
    """An argument of optax's function."""

    #: The option that it is here, or that it masks.
    option: str
    #: Its place among several numbers.
    index: int | None
    default: Any
    is_mask: bool = False
    #: Whether the default is one that no variant has.
    is_own: bool = False


@functools.cache
def arguments_of(rule: type[Rule]) -> Mapping[str, Argument]:
    """What optax's function takes, in its order. Defaults that are not said are those of the variant "optax"."""
    ours = {**defaults(rule), **rule.VARIANTS.get("optax", {})}
    arguments = {}
    for name, said in rule.OPTAX.items():
        if isinstance(said, Mask):
            arguments[name] = Argument(said.option, None, said.default, is_mask=True)
        elif name != KEYWORDS:
            text, default = (said, inspect.Parameter.empty) if isinstance(said, str) else said
            option, _, index = text.partition("[")
            place = int(index[:-1]) if index else None
            if default is inspect.Parameter.empty:
                default = ours[option] if place is None else ours[option][place]
            elif option.endswith("_dtype"):
                default = getattr(jnp, default)
            arguments[name] = Argument(option, place, default, is_own=not isinstance(said, str))
    return arguments


@functools.cache
def signature_of(rule: type[Rule]) -> inspect.Signature:
    """What optax's function takes, in its order, and by keyword all else that the rule has."""
    arguments, types = arguments_of(rule), types_given(rule)
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    rate = {"default": None} if rule.lr_optional else {}
    parameters = [inspect.Parameter("learning_rate", kind, annotation=Any, **rate)]
    for name in rule.OPTAX:
        if name == KEYWORDS:
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            hint = types.get(name, Any) if name == arguments[name].option else Any
            parameters.append(inspect.Parameter(name, kind, default=arguments[name].default, annotation=hint))
    variant = {} if "optax" in rule.VARIANTS else {"variant": None}
    rest: dict[str, Any] = {**ADDED.get(rule.__name__, {}), **variant, **BESIDE}
    taken = {*rest, "seed", *(argument.option for argument in arguments.values() if not argument.is_mask)}
    taken |= set() if rule.has_factors else {"precond_dtype"}
    values = {**defaults(rule), **rule.VARIANTS.get("optax", {})}
    rest |= {name: values[name] for name in defaults(rule) if name not in taken} | {"seed": None}
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=types.get(name, Any))
        for name, value in rest.items()
    ]
    return inspect.Signature(parameters, return_annotation=optax.GradientTransformationExtraArgs)


def types_given(rule: type[Rule]) -> dict[str, Any]:
    """What may be given for each option in JAX: numbers are arrays and schedules too, and dtypes those of jax."""
    types = {**types_of(rule), "on_nonfinite": Literal["propagate", "skip"], "seed": int | None, "stacked_axes": Any}
    types["engine"] = Engine
    arrays = {*numbers_of(rule), *(name for name in types if name.endswith("_dtype"))}
    return {name: Any if name in arrays else hint for name, hint in types.items()}


# ---- the function


@functools.cache
def function_of(rule: type[Rule]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function that makes a transformation of a rule, with the arguments that the rule names after optax."""
    name, signature, arguments = rule.__name__.lower(), signature_of(rule), arguments_of(rule)
    called = {
        argument.option if argument.index is None else f"{argument.option}[{argument.index}]": theirs
        for theirs, argument in arguments.items()
        if not argument.is_mask and (argument.option != theirs or argument.index is not None)
    }

    def function(*given: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        check_renamed(name, options, called)
        check_known(
            name, options, [*signature.parameters, *(key for known in rule.ALSO_NAMED.values() for key in known)]
        )
        also = dict[str, str]()
        for library, known in rule.ALSO_NAMED.items():
            for theirs, ours in known.items():
                if theirs in options:
                    if ours in options:
                        raise OptionError(f"{theirs} is {library}'s name of {ours}: give one of them")
                    options[ours], also[ours] = options.pop(theirs), theirs
        values = dict(signature.bind(*given, **options).arguments)
        rate, variant = values.pop("learning_rate", None), values.pop("variant", None)
        beside = {key: values.pop(key, default) for key, default in BESIDE.items()}
        choices = [
            choice
            for key, argument in arguments.items()
            if argument.is_mask
            for choice in without_where_false(key, values.pop(key, None), **{argument.option: EXEMPT[argument.option]})
        ]
        added = {key: values.pop(key, default) for key, default in ADDED.get(rule.__name__, {}).items()}
        return as_transformation(
            rule,
            rate,
            rename_options(rule, values),
            variant="optax" if "optax" in rule.VARIANTS else variant,
            choices=choices,
            called={**called, **also},
            **beside,
            **({"layout": declare_layout(added["layout"])} if added else {}),
        )

    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__
    origin = f" As ``optax.{name}``." if hasattr(optax, name) else ""
    function.__doc__ = f"{inspect.getdoc(rule)}{origin} Options: docs/{name}.md and docs/jax.md."
    function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    function.__annotations__["return"] = optax.GradientTransformationExtraArgs
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def check_renamed(owner: str, given: Mapping[str, Any], theirs: Mapping[str, str]) -> None:
    """Say so if an option has our name where it needs optax's. theirs: by ours, such as "b1" for "betas[0]"."""
    for name, value in given.items():
        if name in theirs.values():
            continue
        if name in theirs:
            raise OptionError(f"{owner} has no option {name!r}: it is {theirs[name]!r} here")
        parts = [called for ours, called in theirs.items() if ours.startswith(f"{name}[")]
        if parts:
            values = value if is_list(value) and len(value) == len(parts) else ["..."] * len(parts)
            written = ", ".join(f"{part}={number}" for part, number in zip(parts, values, strict=True))
            raise OptionError(f"{owner} has no option {name!r}: it is {' and '.join(parts)} here: write {written}")


def rename_options(rule: type[Rule], values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as options of the rule. What is at the default of optax's argument is left to the variant."""
    arguments, mine = arguments_of(rule), {key: v for key, v in values.items() if key not in arguments_of(rule)}
    for key, argument in arguments.items():
        value = values.get(key, argument.default)
        if argument.index is None and not argument.is_mask and not is_default(key, value, argument):
            mine[argument.option] = value
            need = options_of(rule)[argument.option].need if argument.option in options_of(rule) else None
            if key != argument.option and need is not None and need.relation == "=":
                mine.setdefault(need.option, need.value)  # one argument there that is two options here
    for argument in arguments.values():
        if argument.is_own and argument.default is not None and argument.option not in mine:
            stored = [name for name, known in options_of(rule).items() if known.stores == argument.option]
            if not stored or mine.get(stored[0]) is not None:
                mine[argument.option] = argument.default
    for option in dict.fromkeys(argument.option for argument in arguments.values() if argument.index is not None):
        places = {argument.index: key for key, argument in arguments.items() if argument.option == option}
        parts = tuple(values.get(key, arguments[key].default) for _, key in sorted(places.items()))
        message = f"{places[0]} is one number here, and the second is {places[1]}, got {places[0]}={parts[0]!r}"
        require(not is_list(parts[0]), message)
        if any(key in values for key in places.values()):
            mine[option] = join(parts)
    return mine


def is_default(key: str, value: Any, argument: Argument) -> bool:
    if argument.option.endswith("_dtype") and argument.default is not None:
        return dtype_name(key, value) == dtype_name(key, argument.default)
    return type(value) is type(argument.default) and not differ(value, argument.default)


FUNCTIONS = {name.lower(): function_of(rule) for name, rule in RULES.items()}
globals().update(FUNCTIONS)
__all__ = ["function_of", "transformation", *FUNCTIONS]
