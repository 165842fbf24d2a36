"""Saved state: what it must look like, and files of it that hold arrays and text, never pickles."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from thalweg.arrays import State
from thalweg.codecs import CODECS
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError, StateError
from thalweg.exchange import FROM_TORCH, KEYS, MIXED, VERSION, check_layout, check_step, is_count
from thalweg.numpy.arrays import Arr, Name, checked_name, kind_of
from thalweg.spaces import numpy as xp
from thalweg.spaces.numpy import named_dtype
from thalweg.storage import SPIKES, check_codes, declared

#: How much larger than its file a compressed state may be.
MOST_UNPACKED = 16


def read_state(
    saved: Any, present: Mapping[Name, State[Arr]]
) -> tuple[Any, int, dict[Name, tuple[int, State[Arr], State[Arr]]]]:
    """Learning rate, iteration, and by name (step, entries, what the optimizer keeps beside); checked, and copied."""
    if not is_count(saved["iteration"]):
        raise StateError("this state_dict() is damaged: its iteration must be a count")
    found: dict[Name, tuple[int, State[Arr], State[Arr]]] = {}
    for name, entries in saved["state"].items():
        name = checked_name(name)
        check_step(name, entries)
        arrays = {key: entry_of(name, key, entry) for key, entry in entries.items() if key != "step"}
        beside = {key: arrays.pop(key) for key in (SPIKES,) if key in arrays}
        norms = beside.get(SPIKES, np.zeros(1))
        if norms.ndim != 1 or not np.all(norms >= 0) or not np.all(np.isfinite(norms)):
            raise StateError(f"the state of {name!r} is damaged: {SPIKES!r} must be norms in a row")
        check_codes(xp, name, arrays)
        if name in present and shapes(declared(xp, present[name])) != shapes(declared(xp, arrays)):
            raise StateError(
                f"the state of {name!r} does not fit: the saved entries are {shapes(arrays)}, and this optimizer has "
                f"{shapes(present[name])}"
            )
        found[name] = int(entries["step"]), arrays, beside
    return saved["lr"], int(saved["iteration"]), found


def entry_of(name: Name, key: Any, entry: Any) -> Arr:
    """A copy of an entry of a parameter's state, as an array of floating point."""
    wanted = f"the state of {name!r} must be floating point: {key!r}"
    try:
        found = np.array(entry)
    except Exception:  # of whichever framework it comes from
        found = np.array(None)
    if found.dtype.name not in (*DTYPES, *CODECS):
        if isinstance(entry, (np.ndarray, np.generic)):
            raise StateError(f"{wanted} has dtype {entry.dtype}")
        hint = f": {FROM_TORCH}" if kind_of(entry).startswith("torch.") else ""
        raise StateError(f"{wanted} is a {kind_of(entry)}{hint}")
    return found


def path_of(path: Any, what: str) -> Path:
    if not isinstance(path, (str, os.PathLike)):
        raise StateError(f"{what} needs a path, such as 'optimizer.npz', got {path!r}")
    return Path(path)


def shapes(state: State[Arr]) -> dict[str, tuple[int, ...]]:
    return {key: entry.shape for key, entry in state.items()}


def write_file(path: str | os.PathLike[str], state_dict: Mapping[str, Any]) -> None:
    """Write beside the old file first, so that it is replaced whole or not at all."""
    path = path_of(path, "save")
    write = _writer(path)
    if not path.parent.is_dir():
        raise StateError(f"there is no folder {path.parent} to save in")
    arrays: dict[str, Arr] = {}
    parameters = []
    for index, (name, entries) in enumerate(state_dict["state"].items()):
        parameters.append({"name": name, "dtypes": {key: entry.dtype.name for key, entry in entries.items()}})
        for key, entry in entries.items():
            # bfloat16 is not a dtype that every reader of such files knows
            entry = np.ascontiguousarray(entry).reshape(entry.shape)
            arrays[f"{index}.{key}"] = entry.view(np.uint16) if entry.dtype.name == "bfloat16" else entry
    told = [key for key in (*KEYS, VERSION, MIXED) if key != "state" and key in state_dict]
    about = {**{key: state_dict[key] for key in told}, "parameters": parameters}
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.unlink(missing_ok=True)
        with open(beside, "xb") as file:  # which refuses a link that stands there
            file.write(write(arrays, json.dumps(about)))
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
        arrays, text = _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
        about = json.loads(text)
        check_layout(about["layout"])
        state = {
            parameter["name"]: {
                key: arrays[f"{index}.{key}"].view(named_dtype(dtype)) for key, dtype in parameter["dtypes"].items()
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


def _writer(path: Path) -> Callable[[dict[str, Arr], str], bytes]:
    if path.suffix == ".npz":
        return _npz_bytes
    if path.suffix == ".safetensors":
        return _safetensors()[0]
    raise StateError(f"the file name must end in .npz or .safetensors, got {path.name!r}")


def _npz_bytes(arrays: dict[str, Arr], about: str) -> bytes:
    import io

    file = io.BytesIO()
    entries: dict[str, Any] = {"about": np.array(about), **arrays}
    np.savez(file, **entries)
    return file.getvalue()


def _read_npz(path: Path) -> tuple[dict[str, Arr], str]:
    # opened here, since numpy would leave open what it takes for an archive and cannot read
    with open(path, "rb") as opened:
        _check_sizes(opened, path.stat().st_size)
        opened.seek(0)
        with np.load(opened, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files if key != "about"}
            return arrays, str(file["about"])


def _check_sizes(opened: IO[bytes], size: int) -> None:
    """Refuse an archive whose arrays would take more memory than it says, or far more than it has bytes."""
    with zipfile.ZipFile(opened) as archive:
        members = archive.infolist()
        if (total := sum(member.file_size for member in members)) > MOST_UNPACKED * size:
            raise ValueError(f"{size:,} bytes would unpack to {total:,}")
        if (packed := sum(member.compress_size for member in members)) > size:  # what is asked for is reserved at once
            raise ValueError(f"its arrays should take {packed:,} bytes, and it has {size:,}")
        for member in members:
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
                if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
                    raise ValueError(f"{member.filename} does not have the bytes of an array of shape {shape}")


def _safetensors() -> tuple[Callable[[dict[str, Arr], str], bytes], Any]:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise StateError(".safetensors files need a package that is not installed: pip install safetensors") from None
    return lambda arrays, about: safetensors.numpy.save(arrays, metadata={"about": about}), safetensors.safe_open


def _read_safetensors(path: Path) -> tuple[dict[str, Arr], str]:
    _, safe_open = _safetensors()
    with safe_open(path, framework="numpy") as file:
        return {key: file.get_tensor(key) for key in list(file.keys())}, file.metadata()["about"]
