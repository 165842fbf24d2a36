"""State that goes from one front end to another, or into a file: numpy arrays under names and keys that all share.

The form is that of ``state_dict()`` of ``thalweg.numpy``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from thalweg.codecs import CODECS
from thalweg.dtypes import DTYPES
from thalweg.errors import ResumeWarning, StateError
from thalweg.rules import Rule
from thalweg.settings import in_words

#: The layout that this version writes. Newer layouts are refused by older versions.
LAYOUT = 1
KEYS = ("layout", "optimizer", "lr", "iteration", "state")
#: That of its rule. States of 0.1.0 have none.
VERSION = "version"
#: What the states of several rules are called, and the key under which they tell the rule of each parameter.
MIXTURE, MIXED = "Mixture", "rules"


def exchanged(
    rule: type[Rule] | Mapping[Any, type[Rule]], state: Mapping[Any, Any], *, lr: Any = None, iteration: int = 0
) -> dict[str, Any]:
    """State by parameter and key, as all front ends read it. rule: one for all, or one by parameter."""
    made_by: dict[str, Any]
    if isinstance(rule, Mapping):
        rules = {str(name): [own.__name__, own.version] for name, own in rule.items() if name in state}
        made_by = {"optimizer": MIXTURE, MIXED: rules}
    else:
        made_by = {"optimizer": rule.__name__, VERSION: rule.version}
    return {"layout": LAYOUT, **made_by, "lr": lr, "iteration": iteration, "state": dict(state)}


def check_exchanged(saved: Any, rule: type[Rule], options: Mapping[str, Any] | None = None) -> None:
    """Say if something is no state of this form, or one of another rule or of another version of it.

    options: those it is to be continued with, where they are known; warn if they may not be those of a run of 0.1.0.
    """
    check_form(saved)
    if saved["optimizer"] != rule.__name__:
        raise StateError(f"this is a state of {maker_of(saved)} and cannot be loaded into {rule.__name__}")
    check_version(rule, saved.get(VERSION))
    first = rule.first_options().items()
    if VERSION not in saved and any(options is None or options[name] != value for name, value in first):
        warnings.warn(
            f"this state was saved by thalweg 0.1.0, where the default of {rule.__name__} was what is now "
            f"variant={rule.first_default!r}: a run that began with it goes on unchanged with that variant",
            ResumeWarning,
            stacklevel=5,
        )


def check_mixture(
    saved: Any, rules: Iterable[type[Rule]], rule_of: Callable[[str], type[Rule] | None]
) -> Mapping[str, type[Rule]]:
    """The rules of a state's parameters, by name; raise if it is not one of a mixture of these rules.

    rule_of: what steps a parameter of this name; None if that cannot be told yet.
    """
    check_form(saved)
    known = {rule.__name__: rule for rule in rules}
    mixed = saved.get(MIXED)
    if saved["optimizer"] != MIXTURE or not isinstance(mixed, Mapping):
        raise StateError(f"this is a state of {maker_of(saved)} and cannot be loaded into {in_words(known)}")
    found = {}
    for name in map(str, saved["state"]):
        maker, version = mixed.get(name, (None, None))
        own = rule_of(name)
        if maker not in known or own not in (None, known[maker]):
            here = in_words(known) if own is None else own.__name__
            raise StateError(f"the state of {name!r} is one of {maker} and cannot be loaded into {here}")
        check_version(known[maker], version)
        found[name] = known[maker]
    return found


def maker_of(saved: Mapping[str, Any]) -> str:
    """What has made a state, in words."""
    mixed = saved.get(MIXED)
    several = saved["optimizer"] == MIXTURE and isinstance(mixed, Mapping) and mixed
    return in_words(maker for maker, _ in mixed.values()) if several and mixed else str(saved["optimizer"])


def check_form(saved: Any) -> None:
    """Say if something is no state of this form."""
    if not isinstance(saved, Mapping) or any(key not in saved for key in KEYS):
        raise StateError(f"this is no exported state or state_dict(): it must have the keys {', '.join(KEYS)}")
    check_layout(saved["layout"])
    if not isinstance(saved["state"], Mapping):
        raise StateError("this state_dict() is damaged: its state must be a mapping by name")


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
            if key != "step" and dtype not in (*DTYPES, *CODECS):
                raise StateError(f"the state of {name!r} must be arrays of floating point: {key!r} is {entry!r:.40}")
    return given


def warn_converted(name: object, found: Iterable[str], kept: Iterable[str]) -> None:
    """Tell that state is kept otherwise than it was. found, kept: its keys then and now."""
    lost, made = sorted(set(found) - set(kept)), sorted(set(kept) - set(found))
    warnings.warn(
        f"state was kept otherwise than state_dtype, momentum_dtype and rounding have it now, and was converted: that "
        f"of {name!r} now has {listed(made)} and has no longer {listed(lost)}, and all others alike",
        ResumeWarning,
        stacklevel=6,
    )


def listed(keys: Iterable[str]) -> str:
    return ", ".join(keys) or "nothing else"


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
