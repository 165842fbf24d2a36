"""Checks: small functions in named groups, each with one line that says what must hold and why it matters."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.arguments import split_words, suggest

#: Where the checks of a framework are, in the order in which they are run.
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
    run: Callable[[Any], None]
    #: ``torch``, ``optax``, or ``ranks``, which several processes run together.
    kind: str = "torch"


#: By framework, then by name.
FOUND: dict[str, dict[str, Check]] = {kind: {} for kind in ROOMS}


#: Facts that some checks cannot do with, and what is said of an optimizer that has them.
EXCLUDED = {"couples_parameters": "steps depend on other parameters", "needs_matrices": "only matrices are taken"}


def holds(
    group: str, kind: str = "torch", *, needs: str = "", without: str = ""
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
        FOUND[kind][name] = Check(name, group, (function.__doc__ or "").strip(), run, kind)
        return run

    return register


def checks_of(kind: str) -> dict[str, Check]:
    """All checks for optimizers of a framework, which is imported. The order does not depend on earlier imports."""
    rooms = [importlib.import_module(f"thalweg.check.{room}").__name__ for room in ROOMS[kind]]
    return dict(sorted(FOUND[kind].items(), key=lambda item: rooms.index(item[1].run.__module__)))


def choose_checks(kind: str, only: str | None, *, ranks: bool = False) -> list[Check]:
    """Those of some groups or names, such as ``state,closure-loss``; all for None. Those of ranks come last."""
    checks = list(checks_of(kind).values())
    if ranks and kind == "torch":
        checks += checks_of("ranks").values()
    if only is None:
        return checks
    asked = [word.lower().replace("_", "-").replace(" ", "-") for word in split_words(only, "--only")]
    for word in asked:
        if word in (known := names_of(checks)):
            continue
        if kind == "torch" and word in names_of(checks_of("ranks").values()):
            raise CommandError(f"{word} is checked by several processes: add --ranks 4")
        raise CommandError(f"there is no check or group {word!r}: {suggest(word, sorted(known))}")
    return [each for each in checks if not names_of([each]).isdisjoint(asked)]


def names_of(checks: Iterable[Check]) -> set[str]:
    """What one can ask for: checks and their groups."""
    return {name for each in checks for name in (each.name, each.group.replace(" ", "-"))}
