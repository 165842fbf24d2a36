"""State as all front ends read and write it, in memory and in files: ``state_dict()`` of ``thalweg.numpy``.

A dict of five keys (six with the version of the rule): ``state`` maps the name of each parameter to its arrays by key.
Whether they fit their parameter is asked where they are loaded, as of any state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thalweg.errors import ResumeWarning, StateError, read_as, warn
from thalweg.rules import Rule
from thalweg.settings import in_words
from thalweg.storage import check_layout, check_version, read_count

#: The layout that this version writes. Newer layouts are refused by older versions.
LAYOUT = 1
KEYS = ("layout", "optimizer", "lr", "iteration", "state")
#: That of its rule. States of 0.1.0 have none.
VERSION = "version"
#: What the states of several rules are called, and the key under which they tell the rule of each parameter.
MIXTURE, MIXED = "Mixture", "rules"


def pack_state(
    rule: type[Rule] | Mapping[str, type[Rule]],
    state: Mapping[Any, Any],
    *,
    lr: Any = None,
    iteration: int | None = None,
) -> dict[str, Any]:
    """State by parameter and key, as all front ends read it.

    rule: one for all, or that of each parameter by name. iteration: the most steps that one has taken, if not given.
    """
    if iteration is None:
        iteration = max((int(entries["step"]) for entries in state.values()), default=0)
    if isinstance(rule, Mapping) and len({*rule.values()}) == 1:
        (rule,) = {*rule.values()}
    made_by: dict[str, Any]
    if isinstance(rule, Mapping):
        made_by = {"optimizer": MIXTURE, MIXED: {name: [rule[name].__name__, rule[name].version] for name in state}}
    else:
        made_by = {"optimizer": rule.__name__, VERSION: rule.version}
    return {"layout": LAYOUT, **made_by, "lr": lr, "iteration": iteration, "state": dict(state)}


@read_as("this state")
def read_state(
    saved: Any, rule: type[Rule] | Mapping[str, type[Rule]], options: Mapping[str, Any] | None = None
) -> dict[str, Mapping[str, Any]]:
    """The entries of each parameter by name; raise if something has not this form, or is a state of other rules.

    rule: one for whatever parameters there are, or that of each parameter here. options: of an optimizer with one rule,
    where they are known: warn if they may not be those of a run of 0.1.0.
    """
    if not isinstance(saved, Mapping) or any(key not in saved for key in KEYS):
        shown = f"a dict with {', '.join(map(repr, saved))}" if isinstance(saved, Mapping) else f"{saved!r:.60}"
        raise StateError(
            f"this is not an exported state, which has the keys {', '.join(KEYS)}: it is {shown}; export_state() and "
            "thalweg.numpy's state_dict() make one, and its load(path) reads a file"
        )
    check_layout(saved["layout"], LAYOUT)
    made_by = saved["optimizer"]
    rules = rule if isinstance(rule, Mapping) else dict.fromkeys(map(str, saved["state"]), rule)
    known = {kind.__name__: kind for kind in (rule.values() if isinstance(rule, Mapping) else [rule])}
    if made_by not in (MIXTURE, *known):
        raise StateError(f"this is a state of {made_by} and cannot be loaded into {in_words(known)}")
    for name, entries in saved["state"].items():
        here = rules.get(str(name))
        if here is None:
            raise StateError(f"this state has a parameter {name!r} that is not here: here are {', '.join(rules)}")
        maker, version = saved[MIXED][name] if made_by == MIXTURE else (made_by, saved.get(VERSION))
        if maker != here.__name__:
            raise StateError(f"{name!r} has a state of {maker}, which cannot be loaded into {here.__name__}")
        check_version(here, version)
        if not isinstance(entries, Mapping):
            raise StateError(f"the state of {name!r} must map keys to arrays, got {entries!r:.80}")
        read_count(f"the step of {name!r}", entries.get("step"))
    first = known[made_by].first_options() if VERSION not in saved and made_by != MIXTURE else {}
    if any(options is None or options[option] != value for option, value in first.items()):
        warn(
            f"this state was saved by thalweg 0.1.0, where the default of {made_by} was what is now "
            f"variant={known[made_by].first_default!r}: a run that began with it goes on unchanged with it",
            ResumeWarning,
        )
    return {str(name): entries for name, entries in saved["state"].items()}
