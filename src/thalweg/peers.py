"""Runs that other libraries have started: what the tables of the front ends have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from thalweg.errors import StateError
from thalweg.rules import Rule


@dataclass(frozen=True)
class Source:
    """An optimizer of another library, and the rule that continues its runs."""

    name: str
    rule: type[Rule]

    def __str__(self) -> str:
        return self.name


S = TypeVar("S", bound=Source)


def choose(table: Iterable[S], like: Iterable[S], name: str | None, rule: type[Rule]) -> S:
    """The row of a table by which a state is to be read. like: those that it may be of. name: if the user gave it."""
    candidates = [source for source in like if name in (None, source.name)]
    if not candidates:
        known = ", ".join(map(str, table))
        raise StateError(
            f"this is no state of {name or 'an optimizer that is known'}: known are {known}; of a checkpoint or of a "
            "wrapper, pass the state that is in it"
        )
    able = [source for source in candidates if source.rule is rule]
    if not able:
        name, other = candidates[0].name, candidates[0].rule.__name__
        raise StateError(f"{rule.__name__} cannot continue a run of {name}: {other} can")
    if len(able) > 1:
        names = " or ".join(source.name for source in able)
        raise StateError(f"this state does not tell which optimizer made it: pass source=, {names}")
    return able[0]
