"""Saved state: whether it fits, and how it comes back in the dtype it was saved in, laid out as this run is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import ResumeWarning, StateError
from thalweg.torch.groups import LAYOUT
from thalweg.torch.members import names_of
from thalweg.torch.shards import laid_out

#: What wrappers of a model put into the names of its parameters.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def check_is_state(rule_name: str, saved: Any) -> None:
    """Say if something is no state dict, or one of another optimizer or of a newer layout."""
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        given = f"a {type(saved).__name__}" + (
            f" with {', '.join(map(repr, saved))}" if isinstance(saved, Mapping) else ""
        )
        raise StateError(
            f"this is not a state_dict() of an optimizer: it must have 'state' and 'param_groups', and is {given}"
        )
    for group in saved["param_groups"]:
        if group.get("rule") != rule_name:
            other = f"a state of {group['rule']}" if "rule" in group else "no state of thalweg.torch"
            raise StateError(f"this is {other} and cannot be loaded into {rule_name}")
        if group.get("layout", LAYOUT) > LAYOUT:
            raise StateError(
                f"this state has layout {group['layout']}, and this version reads up to {LAYOUT}: update thalweg"
            )


def check_sizes(saved: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> None:
    sizes = [[len(group["params"]) for group in some] for some in (saved["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise StateError(f"this state has groups of {sizes[0]} parameters, and this optimizer of {sizes[1]}")


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
    """Say which names the two do not share, or that they share them in other groups."""
    found, wanted = ({name for names in some for name in names} for some in (theirs, ours))
    by_position = "to go by position all the same, remove 'param_names' from the saved groups"
    if found != wanted:
        missing, unknown = sorted(wanted - found), sorted(found - wanted)
        raise StateError(
            f"the names of this state are not those of this optimizer: it has no {listed(missing)}, and "
            f"{listed(unknown)} is not here; {by_position}"
        )
    if sorted(map(sorted, theirs)) != sorted(map(sorted, ours)):
        raise StateError(
            f"this state has the same parameters in other groups, and groups have options of their own: {by_position}"
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
    """Overrides and the engine are arguments, and come back with no checkpoint: say if they are others now."""
    before = {group["made_with"] for group in saved["param_groups"] if "made_with" in group} - {made_with}
    if before:
        warnings.warn(
            f"this state was saved with {before.pop()}, and is loaded with {made_with}: give the same ones if the run "
            "is to go on as it began",
            ResumeWarning,
            stacklevel=4,
        )


def check_entries(
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    expected: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Say whose saved state is not what its options make. expected: tensors of their shapes, by parameter."""
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for place, (name, _) in zip(places, named, strict=True):
        entries = saved["state"].get(place)
        if not entries:
            continue
        found = {key: value for key, value in entries.items() if key != "step" and isinstance(value, Tensor)}
        shapes, wanted = shapes_of(found), shapes_of(expected[name])
        counted = isinstance(entries.get("step"), (Tensor, int, float))
        if not counted or shapes != wanted:
            raise StateError(f"the state of {name!r} does not fit: saved is {shapes}, and its options make {wanted}")
        for key, value in found.items():
            check_precision(name, key, value.dtype, expected[name][key].dtype)


def check_precision(name: str, key: str, found: torch.dtype, wanted: torch.dtype) -> None:
    """Loaders that fill the tensors of this run round what they read to their dtype; the saved options tell on them."""
    if found.itemsize < 4 <= wanted.itemsize:
        raise StateError(
            f"the state of {name!r} does not fit: it was saved with {key!r} in {wanted}, and read into {found}: "
            "give this optimizer the options that it was saved with (state_dtype, momentum_dtype, precond_dtype)"
        )


def shapes_of(entries: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(entry.shape) for key, entry in entries.items()}


def restored(
    groups: Sequence[Mapping[str, Any]],
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    expected: Mapping[str, Mapping[str, Tensor]],
    place_of_counts: Callable[[Tensor, Mapping[str, Any]], torch.device],
) -> dict[Tensor, dict[str, Any]]:
    """Copies of saved entries, in their own dtypes, on the devices of their parameters and laid out for them."""
    homes = [group for group in groups for _ in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    found: dict[Tensor, dict[str, Any]] = {}
    for (name, p), group, place in zip(named, homes, places, strict=True):
        for key, value in saved["state"].get(place, {}).items():
            tensor = torch.as_tensor(value, dtype=torch.float32) if key == "step" else torch.as_tensor(value)
            home = place_of_counts(p, group) if key in ("step", "refresh") else p.device
            made = tensor.to(home, copy=True)
            found.setdefault(p, {})[key] = made if key == "step" else laid_out(made, expected[name][key])
    return found
