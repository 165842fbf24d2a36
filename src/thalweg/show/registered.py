"""Every rule by its name, also one's own as ``module:MyRule``: rows of tables, and its optimizers."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from thalweg.errors import CommandError, RuleError
from thalweg.rules import RULES, Rule
from thalweg.show.modules import import_attribute
from thalweg.trial import check_rule

#: What a learning rate is called, here and in optax.
RATE_NAMES = frozenset({"lr", "learning_rate"})

#: Rules of the user's that were asked for, by their names.
OWN: dict[str, type[Rule]] = {}
#: The mixtures of the package, whose names no other may have.
MIXTURES = ("muon_adamw", "kron_adamw")
#: Functions of the user's that make a mixture for a model, by their names.
OWN_MIXTURES: dict[str, Callable[..., Any]] = {}


def rule_of(name: str) -> type[Rule]:
    """The rule of that name: one of the package, or one that was asked for."""
    return RULES[name] if name in RULES else OWN[name]


def is_rule(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, Rule)


def name_rule(reference: Any) -> Any:
    """The name of a rule that is given as ``module:MyRule`` or as a class, which is known by it from then on.

    A function ``module:function``, which makes an optimizer for a model, is known by its name in ``OWN_MIXTURES``.

    It is that of the class, or all of the reference where another rule is called so. What is neither is returned as
    it is.
    """
    rule: Any = reference
    if isinstance(reference, str):
        if ":" not in reference:
            return reference
        rule, _ = import_attribute(reference.strip(), "rule", "mymodule:MyRule", is_rule)
        if inspect.isfunction(rule):
            known = OWN_MIXTURES.get(rule.__name__, rule)
            is_taken = rule.__name__ in MIXTURES or place(known) != place(rule)
            name = reference.strip() if is_taken else rule.__name__
            OWN_MIXTURES[name] = rule
            return name
    elif not inspect.isclass(reference):
        return reference
    try:
        check_rule(rule)
    except RuleError as error:
        raise CommandError(f"{reference}: {error}") from None
    if rule in RULES.values():
        return rule.__name__
    taken = {name.lower(): known for name, known in {**OWN, **RULES}.items() if place(known) != place(rule)}
    name = ":".join(place(rule)) if rule.__name__.lower() in taken else rule.__name__
    OWN[name] = rule
    return name


def is_mixture(name: str) -> bool:
    """Whether a name is that of a function that makes an optimizer for a model."""
    return name in MIXTURES or name in OWN_MIXTURES


def place(rule: Any) -> tuple[str, str]:
    return rule.__module__, rule.__qualname__


def optimizer_of(front_end: str, rule: str) -> Any:
    """What makes optimizers of a rule: a class of ``thalweg.numpy`` or ``thalweg.torch``, or optax's function."""
    module = importlib.import_module(f"thalweg.{front_end}")
    if front_end != "optax":
        return module.optimizer(rule_of(rule))
    return getattr(module, rule.lower()) if rule in RULES else functools.partial(module.transformation, rule_of(rule))


def torch_mixture(name: str) -> Any:
    """The function that makes a mixture for a model: of ``thalweg.torch``, or the user's own."""
    return OWN_MIXTURES.get(name) or getattr(importlib.import_module("thalweg.torch"), name)
