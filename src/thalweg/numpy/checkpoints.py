"""Saved state: what it must look like, and ``.npz`` files of it that hold arrays and text, never pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.arrays import State
from thalweg.codecs import CODECS
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError, StateError
from thalweg.exchange import FROM_TORCH, KEYS, VERSION, check_layout, check_step, is_count
from thalweg.numpy.arrays import Arr, Name, checked_name, kind_of
from thalweg.spaces import numpy as xp
from thalweg.spaces.numpy import named_dtype
from thalweg.storage import SPIKES, check_codes, declared


def read_state(
    saved: Mapping[str, Any], present: Mapping[Name, State[Arr]]
) -> tuple[dict[Name, tuple[int, State[Arr]]], Arr | None]:
    """By name the steps and the entries of a parameter, and the norms kept for ``spikes``; checked, and copied."""
    if not is_count(saved["iteration"]):
        raise StateError("this state_dict() is damaged: its iteration must be a count")
    states: dict[Name, tuple[int, State[Arr]]] = {}
    norms: Arr | None = None
    for name, entries in saved["state"].items():
        name = checked_name(name)
        check_step(name, entries)
        arrays = {key: read_entry(name, key, entry) for key, entry in entries.items() if key != "step"}
        norms = arrays.pop(SPIKES, norms)
        if norms is not None and not (norms.ndim == 1 and np.all(norms >= 0) and np.all(np.isfinite(norms))):
            raise StateError(f"the state of {name!r} is damaged: {SPIKES!r} must be norms in a row")
        check_codes(xp, name, arrays)
        if name in present and shapes(declared(xp, present[name])) != shapes(declared(xp, arrays)):
            raise StateError(
                f"the state of {name!r} does not fit: the saved entries are {shapes(arrays)}, and this optimizer has "
                f"{shapes(present[name])}"
            )
        states[name] = int(entries["step"]), arrays
    return states, norms


def read_entry(name: Name, key: Any, entry: Any) -> Arr:
    """A copy of an entry of a parameter's state, as an array of floating point."""
    wanted = f"the state of {name!r} must be floating point: {key!r}"
    try:
        array = np.array(entry)
    except Exception:  # of whichever framework it comes from
        array = np.array(None)
    if array.dtype.name not in (*DTYPES, *CODECS):
        if isinstance(entry, (np.ndarray, np.generic)):
            raise StateError(f"{wanted} has dtype {entry.dtype}")
        hint = f": {FROM_TORCH}" if kind_of(entry).startswith("torch.") else ""
        raise StateError(f"{wanted} is a {kind_of(entry)}{hint}")
    return array


def shapes(state: State[Arr]) -> dict[str, tuple[int, ...]]:
    return {key: entry.shape for key, entry in state.items()}


def path_of(path: Any, method: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise StateError(f"{method} needs a path, such as 'optimizer.npz', got {path!r}")
    return Path(path)


def write_file(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write beside the old file first, so that it is replaced whole or not at all."""
    path = path_of(path, "save")
    if path.suffix != ".npz":
        raise StateError(f"the file name must end in .npz, got {path.name!r}")
    if not path.parent.is_dir():
        raise StateError(f"there is no folder {path.parent} to save in")
    arrays: dict[str, Any] = {}
    parameters = []
    for index, (name, entries) in enumerate(state_dict["state"].items()):
        parameters.append({"name": name, "dtypes": {key: entry.dtype.name for key, entry in entries.items()}})
        for key, entry in entries.items():
            # bfloat16 is not a dtype that every reader of such files knows
            entry = np.ascontiguousarray(entry).reshape(entry.shape)
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
    path = path_of(path, "load")
    if not path.is_file():  # a pipe or a device would be read for ever
        raise StateError(f"there is no file {path}" if not path.exists() else f"{path} is not a file")
    try:
        # opened here, since numpy would leave open what it takes for an archive and cannot read
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            about = json.loads(str(file["about"]))
            check_layout(about["layout"])
            state = {
                parameter["name"]: {
                    key: file[f"{index}.{key}"].view(named_dtype(dtype)) for key, dtype in parameter["dtypes"].items()
                }
                for index, parameter in enumerate(about.pop("parameters"))
            }
    except OptimError:
        raise
    except ImportError as error:
        raise StateError(
            f"{path} holds bfloat16, which needs a package that is not installed: pip install ml_dtypes"
        ) from error
    except Exception as error:
        raise StateError(f"{path} is damaged, or not a state saved by thalweg.numpy: {error}") from error
    return {**about, "state": state}
