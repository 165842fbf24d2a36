"""Where optimizers' states are found: state dicts, checkpoints of trainers that hold one, and files of both."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from thalweg.errors import StateError
from thalweg.torch.params.checkpoints import check_form

#: How much larger than its file a checkpoint may be.
MOST_UNPACKED = 16
#: How files of torch.save begin: as archives, and before torch 1.6 with a number, pickled.
ARCHIVE, NUMBER = b"PK\x03\x04", (0x1950A86A20F9469CFC6C).to_bytes(10, "little")
#: Keys under which training scripts keep the state of an optimizer in a checkpoint.
HELD_AS = ("optimizer", "optimizer_state_dict", "optim")


def find_state(given: Any) -> Mapping[str, Any]:
    """The state dict of an optimizer in what was given: itself, a checkpoint, or the path of a file of either."""
    if isinstance(given, (str, os.PathLike)):
        given = load_file(given)
    if isinstance(given, Mapping) and "optimizer_states" in given:  # of Lightning
        states = given["optimizer_states"]
        if not isinstance(states, (list, tuple)):
            raise StateError("this checkpoint is damaged: its 'optimizer_states' must be a list")
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
    check_form(given)
    if any("rule" in group for group in given["param_groups"]):
        raise StateError("this is a state of thalweg.torch: load_state_dict takes it")
    return given


def load_file(path: str | os.PathLike[str]) -> Any:
    """What torch.save has written: numbers, text and tensors, never code."""
    named = os.fspath(path)
    if not os.path.isfile(named):  # a pipe or a device would be read for ever
        raise StateError(f"{named:.200} is not a file" if os.path.lexists(named) else f"there is no file {named:.200}")
    try:
        check_beginning(named)
        check_unpacked(named)
        return torch.load(named, map_location="cpu", weights_only=True)
    except StateError:
        raise
    except pickle.UnpicklingError as error:
        raise StateError(
            f"{named} holds more than tensors and numbers: if you trust it, load it with "
            f"torch.load(..., weights_only=False) and pass what that returns ({first_line(error)})"
        ) from None
    except Exception as error:  # of whichever kind a damaged archive leads torch to
        raise StateError(f"{named} is damaged, or was not written by torch.save: {first_line(error)}") from error


def check_beginning(path: str) -> None:
    """Refuse what torch would read as a pickle, taking as much memory as any four bytes in it say."""
    with open(path, "rb") as file:
        found = file.read(32)
    if not found.startswith(ARCHIVE) and NUMBER not in found:
        raise StateError(f"{path} is damaged, or was not written by torch.save: it begins with {found!r}")


def check_unpacked(path: str) -> None:
    """Refuse an archive that would take far more memory than it has bytes: torch.save compresses nothing."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            total, size = sum(member.file_size for member in archive.infolist()), os.path.getsize(path)
        if total > MOST_UNPACKED * size:
            raise StateError(f"{path} is damaged: its {size:,} bytes would unpack to {total:,}")


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
