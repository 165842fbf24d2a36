"""What a shell may complete in the arguments that several verbs take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from thalweg.settings import option_names
from thalweg.show.registered import rule_of


def lists_of(names: Iterable[str], incomplete: str) -> list[str]:
    """Lists between commas whose last name is completed: each of the names once."""
    before, comma, last = incomplete.rpartition(",")
    taken = before.lower().split(",")
    lower = (name.lower() for name in names)
    return [f"{before}{comma}{name}" for name in lower if name.startswith(last.lower()) and name not in taken]


def options_of(rules: Mapping[str, str], incomplete: str) -> list[str]:
    """Names of options, for all optimizers or behind the name of one. rules: by optimizer, the name of its rule."""
    owner, dot, _ = incomplete.partition(".")
    chosen = [rule for name, rule in rules.items() if not dot or name.lower() == owner.lower()]
    names = (f"{owner}.{name}=" if dot else f"{name}=" for rule in chosen for name in option_names(rule_of(rule)))
    return [name for name in dict.fromkeys(names) if name.startswith(incomplete)]
