"""State as all front ends read and write it, in memory and in files: ``state_dict()`` of ``thalweg.numpy``.

A dict of five keys (six with the version of the rule): ``state`` maps the name of each parameter to its arrays by key.
"""

from __future__ import annotations

import os
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
#: Said of a state_dict() of torch, and of tensors in one.
FROM_TORCH = "thalweg.torch.export_state(optimizer) returns a state that all front ends load"


def pack_state(
    rule: type[Rule] | Mapping[Any, type[Rule]], state: Mapping[Any, Any], *, lr: Any = None, iteration: int = 0
) -> dict[str, Any]:
    """State by parameter and key, as all front ends read it. rule: one for all, or one by parameter."""
    made_by: dict[str, Any]
    if isinstance(rule, Mapping):
        rules = {str(name): [maker.__name__, maker.version] for name, maker in rule.items() if name in state}
        made_by = {"optimizer": MIXTURE, MIXED: rules}
    else:
        made_by = {"optimizer": rule.__name__, VERSION: rule.version}
    return {"layout": LAYOUT, **made_by, "lr": lr, "iteration": iteration, "state": dict(state)}


def check_exchanged(
    saved: Any,
    rule: type[Rule] | Iterable[type[Rule]],
    rule_of: Callable[[str], type[Rule] | None] = lambda name: None,
    options: Mapping[str, Any] | None = None,
) -> dict[str, type[Rule]]:
    """The rule that made the state of each parameter, by name; raise if something is no state of these rules.

    rule: that of an optimizer, or those of a mixture. rule_of: what steps a parameter of this name in a mixture; None
    if that cannot be told yet. options: those of an optimizer, where they are known: warn if they may not be those of
    a run of 0.1.0.
    """
    check_form(saved)
    known = {one.__name__: one for one in ((rule,) if isinstance(rule, type) else rule)}
    makers: Any = saved.get(MIXED) if saved["optimizer"] == MIXTURE else None
    is_mixed = isinstance(makers, Mapping)
    if is_mixed == isinstance(rule, type) or not (is_mixed or saved["optimizer"] in known):
        made_by = in_words(maker for maker, _ in makers.values()) if makers else saved["optimizer"]
        raise StateError(f"this is a state of {made_by} and cannot be loaded into {in_words(known)}")
    if isinstance(rule, type):
        check_version(rule, saved.get(VERSION))
        warn_of_first_default(saved, rule, options)
        return dict.fromkeys(map(str, saved["state"]), rule)
    for name in map(str, saved["state"]):
        maker, version = makers.get(name, (None, None))
        here = rule_of(name)
        if maker not in known or here not in (None, known[maker]):
            steps_it = in_words(known) if here is None else here.__name__
            raise StateError(f"the state of {name!r} is one of {maker} and cannot be loaded into {steps_it}")
        check_version(known[maker], version)
    return {name: known[makers[name][0]] for name in map(str, saved["state"])}


def warn_of_first_default(saved: Mapping[str, Any], rule: type[Rule], options: Mapping[str, Any] | None) -> None:
    """Warn if a state of 0.1.0 is to be continued with what was not the default then."""
    first = rule.first_options().items()
    if VERSION not in saved and any(options is None or options[name] != value for name, value in first):
        warnings.warn(
            f"this state was saved by thalweg 0.1.0, where the default of {rule.__name__} was what is now "
            f"variant={rule.first_default!r}: a run that began with it goes on unchanged with that variant",
            ResumeWarning,
            stacklevel=6,
        )


def check_form(saved: Any) -> None:
    """Raise if something has not the form of an exchanged state."""
    wanted = f"this is not an exported state or state_dict(): it must have the keys {', '.join(KEYS)}"
    if isinstance(saved, (str, os.PathLike)):
        raise StateError(f"{wanted}, got {saved!r:.60}; load(path) reads a file")
    if not isinstance(saved, Mapping):
        raise StateError(f"{wanted}, got {type(saved).__name__}")
    if "param_groups" in saved:
        raise StateError(f"{wanted}; this one is torch's, and {FROM_TORCH}")
    if missing := [key for key in KEYS if key not in saved]:
        raise StateError(f"{wanted}, and lacks {', '.join(missing)}")
    check_layout(saved["layout"])
    for key, kind, meaning in (("optimizer", str, "text"), ("state", Mapping, "a mapping by name")):
        if not isinstance(saved[key], kind):
            raise StateError(
                f"this state_dict() is damaged: its {key} must be {meaning}, got {type(saved[key]).__name__}"
            )


def check_version(rule: type[Rule], version: Any) -> None:
    """Refuse a state of another version of a rule. None: it does not say, as those of thalweg 0.1.0; these are of 1."""
    found = 1 if version is None else version
    if not isinstance(found, int) or found != rule.version:
        raise StateError(
            f"this is a state of version {found} of {rule.__name__} and cannot be loaded into version {rule.version}: "
            "load it with the rule that made it, or convert it and set its version"
        )


def check_layout(layout: Any) -> None:
    if not isinstance(layout, int) or layout < 1:
        raise StateError(f"the layout of a saved state must be a whole number from 1, got {layout!r}")
    if layout > LAYOUT:
        raise StateError(f"this state has layout {layout}, and this version reads up to {LAYOUT}: update thalweg")


def entries_of(saved: Mapping[str, Any], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The entries of each parameter, checked but for their shapes. names: those of all parameters here."""
    state = {str(name): entries for name, entries in saved["state"].items()}
    for name, entries in state.items():
        if name not in names:
            raise StateError(f"this state has a parameter {name!r} that is not here: here are {', '.join(names)}")
        check_entries(name, entries)
    return state


def check_entries(name: Any, entries: Any) -> None:
    """Raise if something is no state of a parameter, or does not say how many steps it has taken."""
    if not isinstance(entries, Mapping) or "step" not in entries:
        raise StateError(f"the state of {name!r} must map keys to arrays and have a 'step', got {entries!r:.80}")
    if not is_count(entries["step"]):
        raise StateError(f"the step of {name!r} must be a whole number >= 0, got {entries['step']!r}")
    for key, entry in entries.items():
        dtype = getattr(getattr(entry, "dtype", None), "name", None)
        if key != "step" and dtype not in (*DTYPES, *CODECS):
            raise StateError(f"the state of {name!r} must be arrays of floating point: {key!r} is {entry!r:.40}")


def is_count(value: Any) -> bool:
    """Whether the value is a whole number >= 0, as Python or an array library has it."""
    number = value.item() if getattr(value, "shape", None) == () else value
    return isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31


def warn_converted(name: object, found: Iterable[str], kept: Iterable[str]) -> None:
    """Tell that state is kept otherwise than it was. found, kept: its keys then and now."""
    lost, made = (", ".join(sorted(set(x) - set(y))) or "nothing else" for x, y in ((found, kept), (kept, found)))
    warnings.warn(
        f"state was kept otherwise than state_dtype, momentum_dtype and rounding have it now, and was converted: that "
        f"of {name!r} now has {made} and has no longer {lost}, and all others alike",
        ResumeWarning,
        stacklevel=6,
    )


def list_names(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(map(repr, names[:most])) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
