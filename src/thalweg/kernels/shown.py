"""What kernels written by hand are shown of a rule's state, by roles."""

from __future__ import annotations

from collections.abc import Mapping

from thalweg.arrays import Shape
from thalweg.rules import Rule
from thalweg.rules.entries import Entry, Moment, Square

#: The roles of the entries that kernels are shown, in their order, for each rule whose kernels write in place.
ROLES: Mapping[str, tuple[type[Entry], ...]] = {
    "LARS": (Moment,),
    "LAMB": (Moment, Square),
    "Adafactor": (Square, Square, Moment),
}


def entries_of(rule_name: str, rule: Rule, shape: Shape) -> tuple[str, ...]:
    """The keys of the state that kernels are shown for a parameter of this shape; "" where there is none."""
    keys = {role: iter(rule.keys(shape, role)) for role in ROLES[rule_name]}
    return tuple(next(keys[role], "") for role in ROLES[rule_name])
