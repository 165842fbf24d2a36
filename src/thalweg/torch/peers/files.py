"""Where optimizers' states are found: state dicts, checkpoints of trainers that hold one, and files of both."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch

from thalweg.errors import StateError

#: Keys under which training scripts keep the state of an optimizer in a checkpoint.
HELD_AS = ("optimizer", "optimizer_state_dict", "optim")


def found_state(given: Any) -> Mapping[str, Any]:
    """The state dict of an optimizer in what was given: itself, a checkpoint, or the path of a file of either."""
    if isinstance(given, (str, os.PathLike)):
        given = loaded(given)
    if isinstance(given, Mapping) and "optimizer_states" in given:  # of Lightning
        states = given["optimizer_states"]
        if len(states) != 1:
            raise StateError(
                f"this checkpoint holds the states of {len(states)} optimizers: pass one, as in "
                "checkpoint['optimizer_states'][0]"
            )
        given = states[0]
    if isinstance(given, Mapping) and "param_groups" not in given:
        given = next((given[key] for key in HELD_AS if isinstance(given.get(key), Mapping)), given)
    if not isinstance(given, Mapping) or "state" not in given or "param_groups" not in given:
        raise StateError(
            "this is no state dict of an optimizer, nor a checkpoint that holds one: it must have 'state' and "
            "'param_groups', or 'optimizer_states'"
        )
    if any("rule" in group for group in given["param_groups"]):
        raise StateError("this is a state of thalweg.torch: load_state_dict takes it")
    return given


def loaded(path: str | os.PathLike[str]) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{os.fspath(path)} holds more than tensors and numbers: if you trust it, load it with "
            f"torch.load(..., weights_only=False) and pass what that returns ({str(error).splitlines()[0]})"
        ) from None
