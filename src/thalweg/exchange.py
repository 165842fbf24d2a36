"""State that goes from one front end to another, or into a file: numpy arrays under names and keys that all share.

The form is that of ``state_dict()`` of ``thalweg.numpy``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.dtypes import DTYPES
from thalweg.errors import StateError
from thalweg.rules import Rule

#: The layout that this version writes. Newer layouts are refused by older versions.
LAYOUT = 1
KEYS = ("layout", "optimizer", "lr", "iteration", "state")
#: That of its rule. States of 0.1.0 have none.
VERSION = "version"


def exchanged(
    rule: type[Rule], state: Mapping[Any, Any], *, lr: float | None = None, iteration: int = 0
) -> dict[str, Any]:
    """State by parameter and key, as all front ends read it."""
    made_by = {"optimizer": rule.__name__, VERSION: rule.version}
    return {"layout": LAYOUT, **made_by, "lr": lr, "iteration": iteration, "state": dict(state)}


def check_exchanged(saved: Any, rule: type[Rule]) -> None:
    """Say if something is no state of this form, or one of another rule or of another version of it."""
    if not isinstance(saved, Mapping) or any(key not in saved for key in KEYS):
        raise StateError(f"this is no exported state or state_dict(): it must have the keys {', '.join(KEYS)}")
    check_layout(saved["layout"])
    if not isinstance(saved["state"], Mapping):
        raise StateError("this state_dict() is damaged: its state must be a mapping by name")
    if saved["optimizer"] != rule.__name__:
        raise StateError(f"this is a state of {saved['optimizer']} and cannot be loaded into {rule.__name__}")
    check_version(rule, saved.get(VERSION))


def check_version(rule: type[Rule], version: Any) -> None:
    """Refuse a state of another version of a rule. None: it does not say, as those of thalweg 0.1.0; these are of 1."""
    found = 1 if version is None else version
    if found != rule.version:
        raise StateError(
            f"this is a state of version {found} of {rule.__name__} and cannot be loaded into version {rule.version}: "
            "load it with the rule that made it, or convert it and set its version"
        )


def check_layout(layout: Any) -> None:
    if not isinstance(layout, int) or layout < 1:
        raise StateError(f"the layout of a saved state must be a whole number from 1, got {layout!r}")
    if layout > LAYOUT:
        raise StateError(f"this state has layout {layout}, and this version reads up to {LAYOUT}: update thalweg")


def by_known_name(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The states of parameters that are all known by their names, checked."""
    given = {str(name): entries for name, entries in saved["state"].items()}
    for name, entries in given.items():
        if name not in names:
            raise StateError(f"this state has a parameter {name!r} that is not here: here are {', '.join(names)}")
        check_step(name, entries)
        for key, entry in entries.items():
            dtype = getattr(getattr(entry, "dtype", None), "name", None)
            if key != "step" and dtype not in DTYPES:
                raise StateError(f"the state of {name!r} must be arrays of floating point: {key!r} is {entry!r:.40}")
    return given


def check_step(name: Any, entries: Any) -> None:
    """Say if something is no state of a parameter, or does not say how many steps it has taken."""
    if not isinstance(entries, Mapping) or "step" not in entries:
        raise StateError(f"the state of {name!r} must map keys to arrays and have a 'step', got {entries!r:.80}")
    if not is_count(entries["step"]):
        raise StateError(f"the step of {name!r} must be a whole number >= 0, got {entries['step']!r}")


def is_count(value: Any) -> bool:
    """Whether the value is a whole number >= 0, as Python or an array library has it."""
    number = value.item() if getattr(value, "shape", None) == () else value
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31
