"""Saved state, and ``.npz`` files of it that hold arrays and text, never pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.errors import OptimError, StateError, read_as
from thalweg.exchange import KEYS, LAYOUT, VERSION
from thalweg.numpy.arrays import Arr, Name, checked_name
from thalweg.numpy.engines import Tracked
from thalweg.spaces import numpy as xp
from thalweg.storage import SPIKES, check_codes, check_layout


@read_as("this state")
def read_entries(state: Mapping[Name, Mapping[str, Any]]) -> tuple[dict[Name, Tracked], Arr | None]:
    """What is kept for each parameter, and the norms kept for ``spikes``; checked, and copied."""
    tracked: dict[Name, Tracked] = {}
    norms: Arr | None = None
    for name, entries in state.items():
        for key, entry in entries.items():
            if key != "step" and not hasattr(getattr(entry, "dtype", None), "name"):  # a tensor, a list
                raise StateError(f"the state of {name!r} must be arrays of floating point: {key!r} is {entry!r:.40}")
        arrays = {key: np.array(entry) for key, entry in entries.items() if key != "step"}
        norms = arrays.pop(SPIKES, norms)
        if norms is not None and not (norms.ndim == 1 and np.all(norms >= 0) and np.all(np.isfinite(norms))):
            raise StateError(f"the state of {name!r} is damaged: {SPIKES!r} must be norms in a row")
        check_codes(xp, name, arrays)
        tracked[checked_name(name)] = Tracked(arrays, int(entries["step"]))
    return tracked, norms


def checked_path(path: Any) -> Path:
    if not isinstance(path, (str, os.PathLike)) or Path(path).suffix != ".npz":
        raise StateError(f"state is kept in .npz files: the path must be one such as 'optimizer.npz', got {path!r}")
    return Path(path)


def write_file(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write beside the old file first, so that it is replaced whole or not at all."""
    path = checked_path(path)
    if not path.parent.is_dir():
        raise StateError(f"there is no folder {path.parent} to save in")
    arrays: dict[str, Any] = {}
    parameters = []
    for index, (name, entries) in enumerate(state_dict["state"].items()):
        parameters.append({"name": name, "dtypes": {key: entry.dtype.name for key, entry in entries.items()}})
        for key, entry in entries.items():
            # bfloat16 is not a dtype that every reader of such files knows
            arrays[f"{index}.{key}"] = entry.view(np.uint16) if entry.dtype.name == "bfloat16" else entry
    head = {key: state_dict[key] for key in (*KEYS, VERSION) if key != "state" and key in state_dict}
    about = np.array(json.dumps({**head, "parameters": parameters}))
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:  # which refuses a link that stands there
            np.savez(file, about=about, **arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state dict in a file written by ``write_file``."""
    path = checked_path(path)
    if not path.is_file():  # a pipe or a device would be read for ever
        raise StateError(f"there is no file {path}" if not path.exists() else f"{path} is not a file")
    try:
        # opened here, since numpy would leave open what it takes for an archive and cannot read
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            check_layout(about["layout"], LAYOUT)
            state: dict[Any, dict[str, Arr]] = {}
            for index, parameter in enumerate(about.pop("parameters")):
                entries = state[parameter["name"]] = {}
                for key, dtype in parameter["dtypes"].items():
                    entries[key] = file[f"{index}.{key}"].view(xp.named_dtype(dtype))
    except OptimError as error:
        raise StateError(f"{path}: {error}") from error
    except Exception as error:
        raise StateError(f"{path} is damaged, or not a state saved by thalweg.numpy: {error}") from error
    return {**about, "state": state}
