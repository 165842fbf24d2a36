"""Checks: small functions in named groups, each with a docstring that says what must hold and why it matters."""

from __future__ import annotations

import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.arguments import split_words, suggest

#: The modules with the checks of a framework, and of those that several processes run together, in their order.
ROOMS = {
    "torch": ("contract", "numbers", "states", "memory", "tensors", "bad_input", "nonfinite", "companions", "devices"),
    "optax": ("transformations",),
    "ranks": ("replicas", "models", "shards", "resharding"),
}


class Failed(Exception):
    """What must hold does not; the message says what was seen."""


class NotOffered(Exception):
    """The optimizer does not claim what would be checked; the message says why."""


@dataclass(frozen=True)
class Check:
    """One thing that must hold."""

    name: str
    group: str
    #: What must hold, and why users care.
    holds: str
    #: Takes the subject; raises Failed or NotOffered.
    run: Callable[[Any], None]

    @property
    def over_ranks(self) -> bool:
        """Whether several processes run it together."""
        return self.run.__module__.rpartition(".")[2] in ROOMS["ranks"]


#: The checks of each module that is imported.
CHECKS: dict[str, list[Check]] = defaultdict(list)

#: Facts that some checks cannot do with, and what is said of an optimizer that has them.
EXCLUDED = {"couples_parameters": "steps depend on other parameters", "needs_matrices": "only matrices are taken"}


def holds(
    group: str, *, needs: str = "", without: str = ""
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function as a check: its name and its docstring are the check's.

    needs: a fact that must be declared, else the check is not offered. without: one that must not, of ``EXCLUDED``.
    """

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        @functools.wraps(function)
        def run(subject: Any) -> None:
            declared = getattr(subject.facts, needs) if needs else True
            if declared is None or declared is False:
                raise NotOffered("declared otherwise" if needs == "lr_zero_is_no_step" else "not declared")
            if without and getattr(subject.facts, without):
                raise NotOffered(EXCLUDED[without])
            function(subject)

        name = function.__name__.replace("_", "-")
        CHECKS[function.__module__].append(Check(name, group, (function.__doc__ or "").strip(), run))
        return run

    return register


def checks_of(kind: str) -> dict[str, Check]:
    """The checks of torch, optax or ranks by their names; their modules are imported."""
    modules = [importlib.import_module(f"thalweg.check.{room}").__name__ for room in ROOMS[kind]]
    return {check.name: check for module in modules for check in CHECKS[module]}


def choose_checks(kind: str, only: str | None, ranks: int = 0) -> list[Check]:
    """The checks to run, those over ranks last: all, or those that ``only`` names.

    only: names of checks or groups, such as ``state,closure-loss``. ranks: how many processes there are, or 0.
    """
    checks = list(checks_of(kind).values())
    if ranks and kind == "torch":
        checks += checks_of("ranks").values()
    if only is None:
        return checks
    asked = [word.lower().replace("_", "-").replace(" ", "-") for word in split_words(only, "--only")]
    known = names_of(checks)
    for word in asked:
        if word in known:
            continue
        if kind == "torch" and word in names_of(checks_of("ranks").values()):
            raise CommandError(f"{word} is checked by several processes: add --ranks 4")
        raise CommandError(f"there is no check or group {word!r}: {suggest(word, sorted(known))}")
    return [check for check in checks if not names_of([check]).isdisjoint(asked)]


def names_of(checks: Iterable[Check]) -> set[str]:
    """What one can ask for: checks and their groups."""
    return {name for check in checks for name in (check.name, check.group.replace(" ", "-"))}
