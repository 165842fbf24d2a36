"""Optimizers for raw arrays, made of rules: those of the package, and one's own. Type checkers read optimizers.pyi."""

from __future__ import annotations

import functools

from thalweg.numpy.optimizer import Optimizer
from thalweg.rules import RULES, Rule
from thalweg.signatures import make_class
from thalweg.trial import check_rule


@functools.cache
def optimizer(rule: type[Rule]) -> type[Optimizer]:
    """The class of optimizers for numpy that step by a rule: its options are keyword arguments.

    >>> optimizer(RULES["LAMB"]) is LAMB
    True
    """
    check_rule(rule)
    made: type[Optimizer] = make_class(rule, Optimizer, optimizer)
    return made


globals().update({name: optimizer(rule) for name, rule in RULES.items()})
__all__ = ["optimizer", *RULES]
