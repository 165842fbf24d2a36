"""State that comes from elsewhere, or goes there: another front end, a file, or a run that another library has started.

Between front ends, and in files, it is numpy arrays under names and keys that all share, in the form of
``state_dict()`` of ``thalweg.numpy``.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from thalweg.codecs import CODECS
from thalweg.dtypes import DTYPES
from thalweg.errors import ResumeWarning, StateError
from thalweg.given import differ
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
    if not isinstance(saved["state"], Mapping):
        kind = type(saved["state"]).__name__
        raise StateError(f"this state_dict() is damaged: its state must be a mapping by name, got {kind}")


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


# ---- runs of other libraries

#: From the name that a parameter has at the source to the one it has here. Names that a mapping lacks stay.
Rename: TypeAlias = Callable[[str], str] | Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """What was taken from another optimizer's state, and what had to be made. ``print`` shows it."""

    #: The optimizer whose run is continued, such as "torch.AdamW", and the rule that continues it.
    source: str
    rule: str
    #: How many parameters have state now, and the most steps that one of them has taken; 0 if the source counts none.
    parameters: int
    steps: int
    #: Their keys of state, each with its key here.
    taken: Mapping[str, str] = field(default_factory=dict)
    #: Keys that the source does not save, each with how it begins here.
    made: Mapping[str, str] = field(default_factory=dict)
    #: Options that the source does not save and that could not be compared, as they are here.
    untold: Mapping[str, Any] = field(default_factory=dict)
    #: Parameters of a mixture that begin anew, since their rule is none that continues the source; each with its rule.
    begun: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        after = f" after {counted(self.steps, 'step')}" if self.steps else ""
        lines = [f"{self.rule} continues a run of {self.source}: {counted(self.parameters, 'parameter')}{after}"]
        if self.taken:
            pairs = (ours if theirs == ours else f"{theirs} as {ours}" for theirs, ours in self.taken.items())
            lines.append(f"taken: {', '.join(pairs)}")
        for how in dict.fromkeys(self.made.values()):
            keys = ", ".join(key for key, own in self.made.items() if own == how)
            lines.append(f"made: {keys} ({how})")
        if self.untold:
            given = ", ".join(f"{name}={value!r}" for name, value in self.untold.items())
            lines.append(f"not saved by {self.source}, so taken as constructed here: {given}")
        for rule in dict.fromkeys(self.begun.values()):
            names = [name for name, own in self.begun.items() if own == rule]
            lines.append(f"begun anew, by {rule}: {counted(len(names), 'parameter')} ({list_names(names)})")
        return "\n".join(lines)


def counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def rename_parameter(name: str, rename: Rename | None) -> str:
    """The name that a parameter of the source has here."""
    if rename is None:
        return name
    return rename.get(name, name) if isinstance(rename, Mapping) else rename(name)


def check_same_names(theirs: Sequence[str], ours: Sequence[str]) -> None:
    """Refuse names of the source, after renaming, that are not those of the optimizer; say which do not match."""
    twice = sorted(name for name, times in Counter(theirs).items() if times > 1)
    if twice:
        raise StateError(f"two parameters of the source would be named {list_names(twice)} here: correct rename=")
    lacking, unknown = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    if lacking or unknown:
        raise StateError(
            f"the parameters do not match by name: the source lacks {list_names(lacking)}, and this optimizer lacks "
            f"{list_names(unknown)}; rename= takes a function or a mapping from their names to those here"
        )


def unlike(wanted: Rule, found: Rule, lr: Any, apart: AbstractSet[str]) -> Iterator[tuple[str, Any, Any]]:
    """Options in which two rules of one kind differ, with both values: all that have an effect, but for those apart."""
    idle = wanted.idle(lr)
    for option in fields(wanted):
        theirs, ours = getattr(wanted, option.name), getattr(found, option.name)
        if option.name not in apart and option.name not in idle and differ(theirs, ours):
            yield option.name, theirs, ours


def refused_option(source: str, name: str, option: str, theirs: Any, ours: Any, construct: str) -> StateError:
    """What to say of an option that differs between a source and the optimizer that is to continue its run."""
    return StateError(
        f"{source} stepped {name!r} with what is {option}={theirs!r} here, and this optimizer has {option}={ours!r}: "
        f"to continue the run, construct {construct}; to change an option on purpose, change it after the import"
    )
