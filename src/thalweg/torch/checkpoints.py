"""Saved state: whether it fits, and how it comes back in the dtype it was saved in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.errors import StateError
from thalweg.torch.groups import LAYOUT


def check_fits(
    rule_name: str,
    saved: Mapping[str, Any],
    named: Sequence[tuple[str, Tensor]],
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]],
) -> None:
    """Say what does not fit of a state dict, before anything is loaded."""
    if not isinstance(saved, Mapping) or "state" not in saved or "param_groups" not in saved:
        raise StateError("this is not a state_dict() of an optimizer: it must have 'state' and 'param_groups'")
    for group in saved["param_groups"]:
        if group.get("rule", rule_name) != rule_name:
            raise StateError(f"this is a state of {group['rule']} and cannot be loaded into {rule_name}")
        if group.get("layout", LAYOUT) > LAYOUT:
            raise StateError(
                f"this state has layout {group['layout']}, and this version reads up to {LAYOUT}: update thalweg"
            )
    places = [place for group in saved["param_groups"] for place in group["params"]]
    if len(places) != len(named):
        raise StateError(f"this state is of {len(places)} parameters, and this optimizer has {len(named)}")
    for place, (name, _) in zip(places, named, strict=True):
        entries = saved["state"].get(place)
        if not entries:
            continue
        found = {
            key: tuple(value.shape) for key, value in entries.items() if key != "step" and isinstance(value, Tensor)
        }
        if "step" not in entries or found != dict(shapes[name]):
            raise StateError(
                f"the state of {name!r} does not fit: saved is {found}, and these options make {dict(shapes[name])}"
            )


def restored(groups: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> dict[Tensor, dict[str, Any]]:
    """Copies of saved entries, on the devices of their parameters, in their own dtypes."""
    params = [p for group in groups for p in group["params"]]
    places = [place for group in saved["param_groups"] for place in group["params"]]
    capturable = [group.get("capturable", False) for group in saved["param_groups"] for _ in group["params"]]
    found = {}
    for p, place, on_device in zip(params, places, capturable, strict=True):
        if place not in saved["state"]:
            continue
        found[p] = {
            # single numbers that the host asks for stay where it can see them
            key: torch.as_tensor(value).to(
                "cpu" if key in ("step", "refresh") and not on_device else p.device, copy=True
            )
            for key, value in saved["state"][place].items()
        }
    return found
