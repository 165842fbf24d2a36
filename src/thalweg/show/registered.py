"""Every rule that is registered, also one that somebody has added: rows of tables, and its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from thalweg.rules import RULES

R = TypeVar("R")


class ByRule(Mapping[str, R]):
    """A table with the rows that are given, and one that is made for every other rule."""

    def __init__(self, given: Mapping[str, R], make: Callable[[str], R], key: Callable[[str], str] = str) -> None:
        self.given, self.make, self.key = given, make, key

    def rows(self) -> dict[str, R]:
        others = {self.key(rule): rule for rule in RULES if self.key(rule) not in self.given}
        return {**self.given, **{key: self.make(rule) for key, rule in others.items()}}

    def __getitem__(self, key: str) -> R:
        return self.rows()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows())

    def __len__(self) -> int:
        return len(self.rows())


def numpy_optimizer(rule: str) -> Any:
    """The class of ``thalweg.numpy`` that follows a rule."""
    import thalweg.numpy

    own: Any = getattr(thalweg.numpy, rule, None)
    return own or type(rule, (thalweg.numpy.Optimizer,), {"rule_name": rule})


def torch_optimizer(rule: str) -> Any:
    """The class of ``thalweg.torch`` that follows a rule."""
    import thalweg.torch

    own: Any = getattr(thalweg.torch, rule, None)
    return own or type(rule, (thalweg.torch.Optimizer,), {"rule_name": rule})


def optax_function(rule: str) -> Any:
    """The function of ``thalweg.optax`` that makes a transformation of a rule."""
    import thalweg.optax
    from thalweg.optax.transformation import as_transformation

    def made(learning_rate: Any, **options: Any) -> Any:
        return as_transformation(rule, learning_rate, options)

    return getattr(thalweg.optax, rule.lower(), made)
