"""Saved state: whether it fits, and how it comes back in the dtype it was saved in, laid out as this run is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ResumeWarning, StateError
from thalweg.exchange import check_version
from thalweg.rules import Rule
from thalweg.settings import in_words as rules_in_words
from thalweg.spaces import torch as xp
from thalweg.storage import RECORD, check_codes, check_eight_bits
from thalweg.torch.offload.host import moved
from thalweg.torch.params.groups import LAYOUT
from thalweg.torch.params.members import names_of
from thalweg.torch.sharding.shards import is_distributed, laid_out, whole

#: What wrappers of a model put into the names of its parameters.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


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
    found = [group.get("rule") for group in saved["param_groups"]]
    if found and known and set(found) != set(known):
        other = "not a state of thalweg.torch" if None in found else f"a state of {rules_in_words(found)}"
        hint = ": import_peer continues runs of other optimizers" if None in found else ""
        raise StateError(f"this is {other} and cannot be loaded into {rules_in_words(known)}{hint}")
    for group in saved["param_groups"] if known else ():
        check_version(known[group["rule"]], group.get("rule_version"))
        if not isinstance(layout := group.get("layout", LAYOUT), int) or layout > LAYOUT:
            raise StateError(f"this state has layout {layout!r}, and this version reads up to {LAYOUT}: update thalweg")


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


def check_same_rules(saved: Mapping[str, Any], rules: Sequence[type[Rule]]) -> None:
    """Refuse groups that were stepped by another rule than those here, group by group."""
    for index, (group, rule) in enumerate(zip(saved["param_groups"], rules, strict=True)):
        if group["rule"] != rule.__name__:
            raise StateError(
                f"parameter group {index} of this state was stepped by {group['rule']}, and here it is stepped by "
                f"{rule.__name__}: construct the mixture with the saved entries"
            )


def check_sizes(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    sizes = [[len(group["params"]) for group in some] for some in (saved["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise StateError(
            f"this state has parameter groups of sizes {sizes[0]}, and this optimizer of sizes {sizes[1]}: "
            "they must be equal"
        )


def in_own_order(saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Saved groups and their parameters in the order of these groups, found by name where both have names."""
    by_place = all(isinstance(place, int) for group in saved for place in group["params"])
    if not by_place or not all(map(names_of, (*saved, *groups))):
        return list(saved)  # a loader has gone by name already, or there is nothing to go by
    theirs, ours = ([list(map(bare, group["param_names"])) for group in some] for some in (saved, groups))
    if theirs == ours:
        return list(saved)
    check_names_known(theirs, ours)
    ordered: list[Mapping[str, Any]] = []
    for names in ours:
        group = saved[next(i for i, others in enumerate(theirs) if set(others) == set(names))]
        places = dict(zip(map(bare, group["param_names"]), group["params"], strict=True))
        ordered.append({**group, "params": [places[name] for name in names]})
    return ordered


def check_names_known(theirs: Sequence[Sequence[str]], ours: Sequence[Sequence[str]]) -> None:
    """Refuse states whose names differ, or whose names are in other groups."""
    found, wanted = ({name for names in some for name in names} for some in (theirs, ours))
    by_position = "to match by position instead, remove 'param_names' from the saved groups"
    if found != wanted:
        missing, unknown = sorted(wanted - found), sorted(found - wanted)
        raise StateError(
            f"the names of this state differ from those of this optimizer: the state lacks {listed(missing)}, and the "
            f"optimizer lacks {listed(unknown)}; {by_position}"
        )
    if sorted(map(sorted, theirs)) != sorted(map(sorted, ours)):
        raise StateError(
            "this state has the same parameters in other groups, and each group has its own options: construct the "
            f"optimizer with the saved groups; {by_position}"
        )


def listed(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(map(repr, names[:most])) or "nothing"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def bare(name: str) -> str:
    """A parameter's name without what wrappers of its model have put into it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper) if wrapper == "module." else name.replace(wrapper, "")
    return name


def warn_if_made_otherwise(saved: Mapping[str, Any], made_with: str) -> None:
    """Warn if overrides or the engine, which no checkpoint restores, differ from those of the saved run."""
    before = {group["made_with"] for group in saved["param_groups"] if "made_with" in group} - {made_with}
    if before:
        warnings.warn(
            f"this state was saved with {before.pop()}, and is loaded with {made_with}: construct the optimizer with "
            "the same ones to continue the run unchanged",
            ResumeWarning,
            stacklevel=4,
        )


def check_entries(
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    expected: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse saved state whose entries its options do not make. expected: tensors of their shapes, by parameter."""
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for place, (name, _) in zip(places, named, strict=True):
        entries = saved["state"].get(place)
        if not entries:
            continue
        found = {key: value for key, value in entries.items() if key != "step" and isinstance(value, Tensor)}
        shapes, wanted = shapes_of(found), shapes_of(expected[name])
        counted = is_number(entries.get("step"))
        if not counted or shapes != wanted:
            beside = any(key.removesuffix("_scale") in wanted or key == RECORD for key in shapes.keys() ^ wanted.keys())
            hint = "; load it with the options that it was saved with, and then set others in param_groups"
            raise StateError(
                f"the state of {name!r} does not fit: the saved entries are {shapes}, and its options need {wanted}"
                f"{hint if beside else ''}"
            )
        check_eight_bits(xp, name, found, {key: xp.dtype(entry) for key, entry in expected[name].items()})
        check_codes(xp, name, found, whole)
        for key, value in found.items():
            check_precision(name, key, value.dtype, expected[name][key].dtype)


def check_precision(name: str, key: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Refuse state that a loader rounded, found out by comparing its dtype with that of the saved options.

    A loader that writes into the tensors of this run rounds what it reads to their dtype.
    """
    if found.itemsize < 4 <= wanted.itemsize:
        raise StateError(
            f"the state of {name!r} does not fit: it was saved with {key!r} in {wanted}, and read into {found}; "
            "construct this optimizer with the saved options (state_dtype, momentum_dtype, precond_dtype)"
        )


def is_number(value: Any) -> bool:
    return value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, (int, float))


def shapes_of(entries: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(entry.shape) for key, entry in entries.items()}


def restored(
    groups: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    expected: Mapping[str, Mapping[str, Tensor]],
    counts: Mapping[str, Sequence[str]],
    hosted: Mapping[str, Sequence[str]],
    place_of_counts: Callable[[Tensor, Mapping[str, Any]], torch.device],
) -> dict[Tensor, dict[str, Any]]:
    """Copies of saved entries, in their own dtypes, on the devices of their parameters and laid out for them.

    expected: ghosts of them. counts: their keys that are beside the step. hosted: those that are kept on the host. All
    by parameter.
    """
    homes = [group for group in groups for _ in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    found: dict[Tensor, dict[str, Any]] = {}
    for (name, p), group, place in zip(named, homes, places, strict=True):
        for key, value in saved["state"].get(place, {}).items():
            tensor = torch.as_tensor(value, dtype=torch.float32) if key == "step" else torch.as_tensor(value)
            is_hosted = key in hosted[name]
            home = place_of_counts(p, group) if key in ("step", *counts[name]) else p.device
            if is_hosted and not is_distributed(p):  # else it is laid out over ranks first, on their devices
                home = torch.device("cpu")
            made = tensor.to(home, copy=True)
            made = made if key == "step" else laid_out(made, expected[name][key])
            found.setdefault(p, {})[key] = moved(made, "cpu") if is_hosted else made
    return found
