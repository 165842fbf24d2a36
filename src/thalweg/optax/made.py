"""Gradient transformations made of rules: of one's own, and with the arguments of optax where a rule names them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from thalweg.given import check_known
from thalweg.optax.signatures import check_renamed, counted
from thalweg.optax.transformation import as_transformation, stacks, without_where_false
from thalweg.optax.values import dtype_name, pair
from thalweg.options import defaults, types_of
from thalweg.overrides import Overrides
from thalweg.rules import Rule
from thalweg.settings import option_names
from thalweg.trial import check_rule

#: In ``Rule.OPTAX``: what follows is by keyword alone.
KEYWORDS = "*"
#: What every function takes beside options.
BESIDE: Mapping[str, Any] = {"overrides": (), "stacked_axes": None, "specs": None}


def transformation(
    rule: type[Rule],
    learning_rate: Any = None,
    *,
    variant: str | None = None,
    overrides: Overrides = (),
    stacked_axes: Any = None,
    specs: Any = None,
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
    return as_transformation(
        rule,
        learning_rate,
        {**named_dtypes(options), **counted(stacked_axes)},
        variant=variant,
        overrides=overrides,
        choices=stacks(stacked_axes),
        specs=specs,
    )


def named_dtypes(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with dtypes by their names; a seed of None is not given."""
    known = {name: value for name, value in options.items() if not (name == "seed" and value is None)}
    return {name: dtype_name(name, value) if name.endswith("_dtype") else value for name, value in known.items()}


@functools.cache
def function_of(rule: type[Rule]) -> Callable[..., optax.GradientTransformationExtraArgs]:
    """The function that makes a transformation of a rule, with the arguments that the rule names after optax."""
    name = rule.__name__.lower()
    arguments = {theirs: ours for theirs, ours in rule.OPTAX.items() if theirs != KEYWORDS}
    signature = signature_of(rule)
    called = {ours: theirs for theirs, (ours, _) in arguments.items() if ours and ours != theirs}

    def function(*given: Any, **options: Any) -> optax.GradientTransformationExtraArgs:
        check_renamed(name, options, called)
        check_known(name, options, list(signature.parameters))
        bound = signature.bind(*given, **options)
        bound.apply_defaults()
        values = dict(bound.arguments)
        rate, beside = values.pop("learning_rate"), {key: values.pop(key) for key in BESIDE}
        choices = stacks(beside["stacked_axes"])
        mine, pairs = dict[str, Any](), dict[str, dict[int, Any]]()
        for key, value in values.items():
            ours, default = arguments.get(key, (key, None))
            option, bracket, index = ours.partition("[")
            if not ours:
                choices += without_where_false(key, value, weight_decay=0.0)
            elif bracket:
                pairs.setdefault(option, {})[int(index[:-1])] = value
            elif key in bound.arguments and (value is not None or default is not None or key not in arguments):
                mine[option] = dtype_name(key, value) if option.endswith("_dtype") else value
        mine |= {option: pair(parts[0], parts[1]) for option, parts in pairs.items()}
        return as_transformation(
            rule,
            rate,
            {**named_dtypes(mine), **counted(beside["stacked_axes"])},
            overrides=beside["overrides"],
            choices=choices,
            specs=beside["specs"],
            called=called,
        )

    function.__name__ = function.__qualname__ = name
    function.__module__ = __name__
    function.__doc__ = f"{inspect.getdoc(rule)} As ``optax.{name}``. Options: docs/{name}.md and docs/jax.md."
    function.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    function.__annotations__["return"] = optax.GradientTransformationExtraArgs
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def signature_of(rule: type[Rule]) -> inspect.Signature:
    """What optax's function takes, in its order, and by keyword all else that the rule has."""
    types = {**types_of(rule), "seed": int | None}
    kind: Any = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter("learning_rate", kind, annotation=Any)]
    for theirs, (ours, default) in rule.OPTAX.items():
        if theirs == KEYWORDS:
            kind = inspect.Parameter.KEYWORD_ONLY
        else:
            hint = types.get(ours, Any) if theirs == ours else Any
            parameters.append(inspect.Parameter(theirs, kind, default=default, annotation=hint))
    taken = {ours.partition("[")[0] for ours, _ in rule.OPTAX.values()}
    rest = {**BESIDE, **{name: value for name, value in defaults(rule).items() if name not in (*taken, *BESIDE)}}
    rest.pop("precond_dtype")
    rest["seed"] = None
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters += [
        inspect.Parameter(name, keyword, default=value, annotation=types.get(name, Any)) for name, value in rest.items()
    ]
    return inspect.Signature(parameters, return_annotation=optax.GradientTransformationExtraArgs)
