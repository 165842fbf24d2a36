"""Saved state: whether it fits, and how it comes back in the dtype it was saved in, laid out as this run is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import StateError
from thalweg.torch.groups import LAYOUT
from thalweg.torch.shards import laid_out


def check_groups(rule_name: str, saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Say if a state dict is of another optimizer, of other groups, or of a newer layout."""
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise StateError("this is not a state_dict() of an optimizer: it must have 'state' and 'param_groups'")
    for group in saved["param_groups"]:
        if group.get("rule") != rule_name:
            other = f"a state of {group['rule']}" if "rule" in group else "no state of thalweg.torch"
            raise StateError(f"this is {other} and cannot be loaded into {rule_name}")
        if group.get("layout", LAYOUT) > LAYOUT:
            raise StateError(
                f"this state has layout {group['layout']}, and this version reads up to {LAYOUT}: update thalweg"
            )
    sizes = [[len(group["params"]) for group in some] for some in (saved["param_groups"], groups)]
    if sizes[0] != sizes[1]:
        raise StateError(f"this state has groups of {sizes[0]} parameters, and this optimizer of {sizes[1]}")


def with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group whose options are tuples where a loader has made lists of them."""
    own = ("params", "param_names")
    return {k: tuple(value) if isinstance(value, list) and k not in own else value for k, value in group.items()}


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
