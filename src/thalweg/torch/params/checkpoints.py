"""Saved state: whether it fits, and how it comes back in the dtype it was saved in, laid out as this run is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import OptionError, ResumeWarning, StateError, read_as, warn
from thalweg.given import GONE
from thalweg.rules import Rule
from thalweg.rules.around import keys_around
from thalweg.rules.entries import Count
from thalweg.settings import ParameterOptions, around_options
from thalweg.settings import in_words as rules_in_words
from thalweg.spaces import torch as xp
from thalweg.storage import SPIKES, WEIGHTS, check_layout, check_saved, check_version
from thalweg.torch.params.groups import (
    EVALUATED_LAYOUT,
    LAYOUT,
    Group,
    Groups,
    homes_in,
    load_group,
    names_of,
)
from thalweg.torch.params.states import convert_count, expected_entries
from thalweg.torch.sharding.shards import lay_out, meta_like, whole

#: What wrappers of a model put into the names of its parameters.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def read_state(
    saved: Mapping[str, Any],
    groups: Groups,
    mine: Sequence[Group],
    defaults: Group,
    place_of_counts: Callable[..., torch.device],
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Tensor]]]:
    """The groups and the states of a checkpoint, for the groups of this optimizer, checked. Tensors are copies."""
    with read_as("this state"):
        ordered = order_groups(saved["param_groups"], mine)
        check_sizes(ordered, mine)
        entries = [groups.entry_of(group) for group in mine]
        check_same_rules(ordered, [entry.rule for entry in entries])
        loaded = [
            load_group(entry.rule, theirs, ours, groups.defaults_for(ours, defaults))
            for entry, theirs, ours in zip(entries, ordered, mine, strict=True)
        ]
        settings = read_options(groups, loaded, mine)
        states = [saved["state"].get(place) or {} for group in ordered for place in group["params"]]
        restored: dict[Tensor, dict[str, Tensor]] = {}
        for (name, p, index), setting, s in zip(homes_in(mine), settings, states, strict=True):
            if s:
                place = place_of_counts(p, setting, capturable=loaded[index]["capturable"])
                restored[p] = restore_entries(name, p, setting, s, place)
    new = {name for ours, theirs in zip(loaded, ordered, strict=True) for name in ours.keys() - theirs}
    if added := new & {*around_options(), "spikes"}:
        message = f"this state was saved without {', '.join(sorted(added))}, and the run goes on with it"
        warn(f"{message}: leave it out to continue unchanged", ResumeWarning)
    return loaded, restored


def read_options(groups: Groups, saved: Sequence[Group], mine: Sequence[Group]) -> list[ParameterOptions]:
    """What saved groups ask for every parameter of an optimizer's own groups, in their order."""
    try:
        options = list(map(groups.make_options, saved))
        return [options[index].choose(name, p)[0] for name, p, index in homes_in(mine)]
    except OptionError as error:
        raise StateError(f"the options of this state are not valid: {error}") from None


def check_is_state(rules: Sequence[type[Rule]], saved: Any) -> None:
    """Refuse what is not a state dict, or is one of other rules, of another version of one, or of a newer layout.

    rules: those of the groups of this optimizer.
    """
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        given = f"a {type(saved).__name__}" + (
            f" with {', '.join(map(repr, saved))}" if isinstance(saved, Mapping) else ""
        )
        raise StateError(
            f"this is not a state_dict() of an optimizer: it must have 'state' and 'param_groups', and is {given}"
        )
    check_form(saved)
    known = {rule.__name__: rule for rule in rules}
    names = [group.get("rule") for group in saved["param_groups"]]
    if names and known and set(names) != set(known):
        other = "not a state of thalweg.torch" if None in names else f"a state of {rules_in_words(names)}"
        hint = ": import_peer continues runs of other optimizers" if None in names else ""
        raise StateError(f"this is {other} and cannot be loaded into {rules_in_words(known)}{hint}")
    for group in saved["param_groups"]:
        check_nothing_gone(group)
    if known:
        for group in saved["param_groups"]:
            check_version(known[group["rule"]], group.get("rule_version"))
            check_layout(group.get("layout", LAYOUT), EVALUATED_LAYOUT)


def check_nothing_gone(group: Mapping[str, Any]) -> None:
    """Refuse a run with an option that earlier versions had: without it, the run would silently become another."""
    for name in GONE:
        if group.get(name):
            raise StateError(
                f"this state was saved with {name}={group[name]!r}, which is gone since 0.3: {GONE[name]}; to continue "
                "this run, turn the option off with thalweg 0.2, take a step and save again"
            )


def check_form(saved: Mapping[str, Any]) -> None:
    """Refuse a state dict whose groups and entries are not what every optimizer of torch has."""
    groups, state = saved["param_groups"], saved["state"]
    for group in groups if isinstance(groups, (list, tuple)) else (None,):
        keys = group.get("params") if isinstance(group, Mapping) else None
        if not isinstance(keys, (list, tuple)) or not all(isinstance(key, (int, str)) for key in keys):
            raise StateError("this state is damaged: its 'param_groups' must be mappings in a list, each with 'params'")
        names = group.get("param_names")
        names = [] if names is None else names
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise StateError("this state is damaged: its 'param_names' must be lists of names")
        if not isinstance(group.get("rule"), (str, type(None))):
            raise StateError("this state is damaged: the 'rule' of a group must be the name of one")
        for key, option in group.items():
            if isinstance(option, Tensor) and option.numel() != 1:
                raise StateError(f"this state is damaged: {key!r} of a group must be one number, not {option.numel()}")
    if not isinstance(state, Mapping) or not all(isinstance(entries, Mapping) for entries in state.values()):
        raise StateError("this state is damaged: its 'state' must be a mapping of mappings")


def check_same_rules(saved: Sequence[Group], rules: Sequence[type[Rule]]) -> None:
    """Refuse groups that were stepped by another rule than those here, group by group."""
    for index, (group, rule) in enumerate(zip(saved, rules, strict=True)):
        if group["rule"] != rule.__name__:
            raise StateError(
                f"parameter group {index} of this state was stepped by {group['rule']}, and here it is stepped by "
                f"{rule.__name__}: construct the mixture with the saved entries"
            )


def check_sizes(saved: Sequence[Group], mine: Sequence[Group]) -> None:
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, mine)]
    if sizes[0] != sizes[1]:
        raise StateError(
            f"this state has parameter groups of sizes {sizes[0]}, and this optimizer of sizes {sizes[1]}: "
            "they must be equal"
        )


def order_groups(saved: Sequence[Group], mine: Sequence[Group]) -> list[Group]:
    """Saved groups and their parameters in the order of one's own, found by name where both have names."""
    by_place = all(isinstance(place, int) for group in saved for place in group["params"])
    if not by_place or not all(map(names_of, (*saved, *mine))):
        return list(saved)  # a loader has gone by name already, or there is nothing to go by
    theirs, ours = ([list(map(strip_wrappers, group["param_names"])) for group in groups] for groups in (saved, mine))
    if theirs == ours:
        return list(saved)
    check_names_known(theirs, ours)
    ordered: list[Group] = []
    for names in ours:
        index = next(i for i, others in enumerate(theirs) if set(others) == set(names))
        places = dict(zip(theirs[index], saved[index]["params"], strict=True))
        ordered.append({**saved[index], "params": [places[name] for name in names]})
    return ordered


def check_names_known(theirs: Sequence[Sequence[str]], ours: Sequence[Sequence[str]]) -> None:
    """Refuse states whose names differ, or whose names are in other groups."""
    saved, wanted = ({name for names in lists for name in names} for lists in (theirs, ours))
    by_position = "to match by position instead, remove 'param_names' from the saved groups"
    if saved != wanted:
        missing, unknown = sorted(wanted - saved), sorted(saved - wanted)
        raise StateError(
            f"the names of this state differ from those of this optimizer: the state lacks {list_names(missing)}, and "
            f"the optimizer lacks {list_names(unknown)}; {by_position}"
        )
    if sorted(map(sorted, theirs)) != sorted(map(sorted, ours)):
        raise StateError(
            "this state has the same parameters in other groups, and each group has its own options: construct the "
            f"optimizer with the saved groups; {by_position}"
        )


def list_names(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(map(repr, names[:most])) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def strip_wrappers(name: str) -> str:
    """A parameter's name without what wrappers of its model have put into it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name


def warn_if_made_otherwise(saved: Iterable[Group], made_with: str) -> None:
    """Warn if overrides or the engine, which no checkpoint restores, differ from those of the saved run."""
    before = {group["made_with"] for group in saved if "made_with" in group} - {made_with}
    if before:
        warn(
            f"this state was saved with {before.pop()}, and is loaded with {made_with}: construct the optimizer with "
            "the same ones to continue the run unchanged",
            ResumeWarning,
        )


def restore_entries(
    name: str, p: Tensor, setting: ParameterOptions, saved: Mapping[str, Any], place_of_counts: torch.device
) -> dict[str, Tensor]:
    """Copies of the saved entries of a parameter, checked, in their own dtypes, where it is and laid out like it.

    setting: what the saved options are for it. place_of_counts: where counts are to be.
    """
    wanted = expected_entries(setting, p, name)
    # what is new around a rule begins with the next step
    new = {*keys_around(setting.rule_at(1), tuple(p.shape)), SPIKES} - saved.keys()
    wanted = {key: entry for key, entry in wanted.items() if key not in new}
    if WEIGHTS in saved:
        wanted[WEIGHTS] = meta_like(p).to(saved[WEIGHTS].dtype)
    entries = {key: value for key, value in saved.items() if key != "step"}
    check_saved(xp, name, entries, wanted, whole)
    counts = setting.rule.keys(tuple(p.shape), Count)
    state = {"step": convert_count(name, saved.get("step")).to(place_of_counts)}
    for key, value in entries.items():
        # a loader that writes into the tensors of this run rounds what it reads to their dtype
        if value.dtype.itemsize < 4 <= wanted[key].dtype.itemsize:
            raise StateError(
                f"the state of {name!r} does not fit: it was saved with {key!r} in {wanted[key].dtype}, and read into "
                f"{value.dtype}; construct this optimizer with the saved options (state_dtype, momentum_dtype, "
                "precond_dtype)"
            )
        copied = torch.as_tensor(value).to(place_of_counts if key in counts else p.device, copy=True)
        state[key] = lay_out(copied, wanted[key])
    return state
