"""Checks: small functions in named groups, each with one line that says what must hold and why it matters."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.lists import suggestion, words

#: Where the checks of a framework are, in the order in which they are run.
ROOMS = {
    "torch": ("contract", "numbers", "states", "memory", "dtypes", "layouts", "bad_input", "nonfinite", "companions"),
    "optax": ("transformations",),
    "ranks": ("ranks",),
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


#: By framework, then by name.
FOUND: dict[str, dict[str, Check]] = {kind: {} for kind in ROOMS}


def holds(group: str, kind: str = "torch") -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function as a check: its name and its docstring are the check's."""

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        name = function.__name__.replace("_", "-")
        FOUND[kind][name] = Check(name, group, (function.__doc__ or "").strip(), function)
        return function

    return register


def checks_of(kind: str) -> dict[str, Check]:
    """All checks for optimizers of a framework, which is imported. The order does not depend on earlier imports."""
    rooms = [importlib.import_module(f"thalweg.check.{room}").__name__ for room in ROOMS[kind]]
    return dict(sorted(FOUND[kind].items(), key=lambda item: rooms.index(item[1].run.__module__)))


def chosen_checks(kind: str, only: str | None) -> list[Check]:
    """Those of some groups or names, such as ``state,closure-loss``; all for None."""
    checks = list(checks_of(kind).values())
    if only is None:
        return checks
    asked = [word.lower().replace("_", "-") for word in words(only, "--only")]
    known = {each.group.replace(" ", "-") for each in checks} | {each.name for each in checks}
    asked = [word.replace(" ", "-") for word in asked]
    for word in asked:
        if word not in known:
            raise CommandError(f"there is no check or group {word!r}: {suggestion(word, sorted(known))}")
    return [each for each in checks if each.name in asked or each.group.replace(" ", "-") in asked]
