"""Saved state: whether it fits, and how it comes back in the dtype it was saved in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import StateError
from thalweg.torch.groups import LAYOUT


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


def check_entries(
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> None:
    """Say whose saved state is not what its options make."""
    places = [place for group in saved["param_groups"] for place in group["params"]]
    for place, (name, _) in zip(places, named, strict=True):
        entries = saved["state"].get(place)
        if not entries:
            continue
        found = {
            key: tuple(value.shape) for key, value in entries.items() if key != "step" and isinstance(value, Tensor)
        }
        if "step" not in entries or found != dict(shapes[name]):
            raise StateError(
                f"the state of {name!r} does not fit: saved is {found}, and its options make {dict(shapes[name])}"
            )


def place_of_counts(p: Tensor, group: Mapping[str, Any]) -> torch.device:
    """Where step and refresh live: with the host, unless the device alone may know them."""
    on_device = group["capturable"] or group["on_nonfinite"] == "skip"
    return p.device if on_device else torch.device("cpu")


def restored(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Copies of saved entries, on the devices of their parameters, in their own dtypes."""
    params = [(p, group) for group in groups for p in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    found: dict[Tensor, dict[str, Any]] = {}
    for (p, group), place in zip(params, places, strict=True):
        for key, value in saved["state"].get(place, {}).items():
            tensor = torch.as_tensor(value, dtype=torch.float32) if key == "step" else torch.as_tensor(value)
            home = place_of_counts(p, group) if key in ("step", "refresh") else p.device
            found.setdefault(p, {})[key] = tensor.to(home, copy=True)
    return found
