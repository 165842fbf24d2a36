"""Signatures, types and classes of optimizers, made from the fields of rules."""

from __future__ import annotations

import copyreg
import functools
import inspect
import operator
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, TypeAlias, get_type_hints

from thalweg.arrays import Scalar
from thalweg.given import Overrides
from thalweg.rules import AROUND, RULES, Rule
from thalweg.rules.options import alternatives, hints_of, number_options
from thalweg.settings import Numerics, defaults

#: A number, or a function of the step (counted from 1).
Schedulable: TypeAlias = float | Callable[[int], Any]
Pair: TypeAlias = tuple[float, float] | Callable[[int], Any]
Triple: TypeAlias = tuple[float, float, float] | Callable[[int], Any]
#: Arguments beside options that every optimizer has.
BESIDE = {"variant": str | None, "overrides": Overrides}


def types_of(rule: type[Rule]) -> dict[str, Any]:
    """What may be given for each option: its own type, and functions of the step for numbers."""
    types = {
        name: type_given(hint, name in number_options(kind))
        for kind in (rule, *AROUND)
        for name, hint in hints_of(kind).items()
    }
    return {**BESIDE, **types, **hints_of(Numerics)}


def type_given(hint: Any, is_number: bool) -> Any:
    given = {Scalar: Schedulable, tuple[Scalar, Scalar]: Pair, tuple[Scalar, Scalar, Scalar]: Triple}
    if is_number:
        given |= {float: Schedulable, tuple[float, float]: Pair}
    # functions come last: jsonargparse tries types in their order, and takes all else for a function
    kinds = sorted((given.get(kind, kind) for kind in alternatives(hint)), key=lambda kind: kind in given.values())
    if types.NoneType in kinds:
        kinds = [*(kind for kind in kinds if kind is not types.NoneType), types.NoneType]
    return functools.reduce(operator.or_, kinds)


def make_class(rule: type[Rule], base: type[Any], maker: Callable[[type[Rule]], Any]) -> Any:
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
    return (type if shipped else RuleClass)(rule.__name__, (base,), body)


class RuleClass(ABCMeta):
    """The type of classes made of rules that no module of thalweg has: a pickle names the rule, and makes them again.

    It is one of abstract classes, so that they can be mixed with such.
    """

    rule: type[Rule]
    maker: Callable[[type[Rule]], Any]


def reduce_class(cls: RuleClass) -> Any:
    return (cls.maker, (cls.rule,)) if "maker" in vars(cls) else cls.__qualname__


copyreg.pickle(RuleClass, reduce_class)
