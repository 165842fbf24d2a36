"""The rules that are compared, and how many bytes each of them must move at least."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from thalweg.errors import RuleError
from thalweg.plan.costs import bytes_moved
from thalweg.plan.models import Model
from thalweg.plan.optimizers import setting_of
from thalweg.programs.budget import passes_of
from thalweg.show.registered import ByRule


@dataclass(frozen=True)
class Rule:
    """What it is called, and why a step moves what it does, if tensors are larger than the caches."""

    #: As in plans and pictures.
    title: str

    @property
    def moves(self) -> bool:
        """Whether memory is what limits it; else arithmetic does."""
        return bool(self.passes)

    @property
    def why(self) -> str:
        if not self.moves:
            return "matrix products take longer than memory does"
        matrices, vectors = self.passes
        return matrices if matrices == vectors else f"matrices: {matrices}; vectors: {vectors}"

    @functools.cached_property
    def passes(self) -> tuple[str, ...]:
        """Of matrices and of vectors, in words; nothing where no machine can read the rule."""
        setting = setting_of(self.title)
        try:
            return tuple(str(passes_of(setting, shape, "float32")) for shape in (MATRIX, VECTOR))
        except RuleError:
            return ()


RULES: Mapping[str, Rule] = ByRule({}, Rule, str.lower)
#: Shapes that rules may treat differently.
MATRIX, VECTOR = (1024, 1024), (1024,)
#: What is compared where nothing else is said.
USUAL = ("lamb", "lars", "adafactor")


def floor(rule: str, model: Model) -> int | None:
    """Bytes that a step of the whole model must move; None where that says nothing about its time.

    >>> from thalweg.plan.models import builtin
    >>> gpt2 = builtin("gpt2")
    >>> [round(floor(rule, gpt2) / gpt2.parameters, 1) for rule in ("lamb", "lars", "adafactor", "adamw", "sgd")]
    [40.0, 28.0, 24.0, 28.0, 20.0]
    """
    if not RULES[rule].moves:
        return None
    return sum(bytes_moved(RULES[rule].title, tensor) for tensor in model.tensors)
