"""Whom to check: an optimizer with its options, and what its author declares of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.check.registry import NotOffered


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What an author declares of an optimizer, where it differs from what most of them do."""

    #: Nothing moves with a learning rate of 0.
    lr_zero_is_no_step: bool = True
    #: Only two-dimensional parameters are taken. An optimizer that refuses a vector has declared it by that.
    needs_matrices: bool = False
    #: Steps depend on other parameters too, as with clipping by a global norm.
    couples_parameters: bool = False
    #: Gradients times a power of two make the same steps.
    scale_invariant: bool = False
    #: Gradients and parameters with the opposite sign make steps with the opposite sign.
    odd: bool = False
    #: Temporary memory of a step is at most this multiple of the parameters' bytes.
    temporaries: float | None = None
    #: A step of sharded parameters takes at most so many collectives, however many parameters there are.
    collectives: int | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An optimizer that is checked: checks make as many instances of it as they need."""

    name: str
    factory: Callable[..., Any]
    options: Mapping[str, Any]
    facts: Facts
    #: ``torch`` or ``optax``: which checks are run.
    kind: str

    def make(self, *params: Any, **more: Any) -> Any:
        """An instance with the subject's options, and others beside them or instead.

        The global seed of torch is set before: one that draws from it fails where that is checked, and not everywhere.
        """
        if self.kind == "torch":
            import torch

            torch.manual_seed(0)
        return self.factory(*params, **{**self.options, **more})

    def needs(self, fact: str, why: str) -> None:
        """Go on only where a fact is declared."""
        if (declared := getattr(self.facts, fact)) is None or declared is False:
            raise NotOffered(why)

    def refuses(self, fact: str, why: str) -> None:
        """Go on only where a fact is not declared."""
        if getattr(self.facts, fact):
            raise NotOffered(why)
