"""Files that lie, for all that reads files: whole ones with other bytes, or with other values under right checksums.

``tried`` reads one and says what is wrong with the reader: an exception that is not ours, too long, too much memory.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import strategies as st

import thalweg.numpy
from thalweg.errors import CommandError, OptimError
from thalweg.kernels.cpu.compiler import SUFFIX, find_kept
from thalweg.plan.load import load_model
from thalweg.race.run import read_records
from thalweg.show.arguments import parse_option

#: Of processor time and of memory: so many times the file, and what any reading takes.
SECONDS, FACTOR, BESIDE = 1.0, 64, 4_000_000
#: By how much a process may grow beside what tracemalloc sees, for reasons of its own.
UNTRACED = 100_000_000
LIES: list[Any] = [-1, 0, 2**31, 2**63, 10**30, 1e308, True, None, "", "..", "../../etc/passwd", "a\0b", "<script>"]
LIES += ["x" * 1000, [], {}, [[[]]], {"": None}, [2**62, 2**62], ["a"] * 100, "float64", "int8", "object"]


def optimizer() -> Any:
    made = thalweg.numpy.LAMB(lr=0.1, state_dtype="int8")
    given = {"a": np.ones((3, 2)), "b": np.ones(4), "coded": np.ones((64, 64), "float32")}
    made.step({name: x.copy() for name, x in given.items()}, given)
    return made


def npz(about: Any, arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, about=np.array(json.dumps(about)), **arrays)
    return file.getvalue()


def npz_parts(path: Path) -> tuple[Any, dict[str, Any]]:
    with np.load(path, allow_pickle=False) as file:
        return json.loads(str(file["about"])), {key: file[key] for key in file.files if key != "about"}


def safetensors(header: Any, data: bytes = b"\0" * 64) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def record(content: Any) -> bytes:
    """A line of a race."""
    return (json.dumps(content) + "\n").encode()


RUN = dict(task="t", fingerprint="f", contestant="c", optimizer="o", lr=0.1, seed=0, batch_size=None, steps=1)
RUN |= dict(engine="auto", device="cpu", thalweg="0")
RESULT: dict[str, Any] = dict(step=[0, 1], seconds=[0.0, 1.0], loss=[1.0, None], score=None, parameters=1)
RESULT |= dict(state_bytes=1, engine="auto")
HEADER = {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}
HEADER |= {"b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}, "__metadata__": {"format": "pt"}}


@dataclass(frozen=True)
class Kind:
    """A kind of file: its name, what a whole one says, its bytes, and who reads it."""

    name: str
    says: Any
    written: Callable[[Any], bytes]
    read: Callable[[Path], Any]
    #: Lies that only such files can tell.
    lies: Sequence[Any] = ()


def as_json(says: Any) -> bytes:
    return json.dumps(says).encode()


#: What the cache has under the key: native code, as far as its name says.
CODE, KEY = b"\x7fELF" + bytes(range(256)), "0" * 24


def read_cache(path: Path) -> None:
    """Give back what is kept: it must be what it was, or nothing."""
    folder = path.parent / "cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = folder / f"{KEY}-{hashlib.sha256(CODE).hexdigest()[:32]}{SUFFIX}"
    file.write_bytes(path.read_bytes())
    with mock.patch.dict(os.environ, THALWEG_CACHE=str(folder)):
        if (find_kept(KEY) is not None) != (path.read_bytes() == CODE):
            raise AssertionError("changed code would be loaded, or whole code would not be")


def read_option(path: Path) -> Any:
    return parse_option(f"x={path.read_text(errors='replace')}")


def kinds(folder: Path) -> dict[str, Kind]:
    optimizer().save(folder / "whole.npz")
    about, arrays = npz_parts(folder / "whole.npz")
    whole = {"run": RUN, "result": RESULT, "where": {}}
    found = [
        Kind("state.npz", about, lambda says: npz(says, arrays), lambda path: optimizer().load(path)),
        Kind("model.safetensors", HEADER, safetensors, lambda path: load_model(str(path))),
        Kind("runs.jsonl", whole, record, read_records),
        Kind("compiled", None, lambda says: CODE, read_cache),
        Kind("option", {"a": [1, None, "x"]}, as_json, read_option),
    ]
    return {kind.name: kind for kind in found}


@st.composite
def changed(draw: Any, value: Any, lies: Sequence[Any]) -> Any:
    """A value with a lie in one place."""
    if isinstance(value, (dict, list)) and value and draw(st.integers(0, 4)):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = draw(st.sampled_from(list(keys)))
        copy: Any = value.copy()
        what = draw(st.sampled_from(["deeper", "deeper", "deeper", "without", "renamed"]))
        if what == "deeper":
            copy[key] = draw(changed(value[key], lies))
        else:
            taken = copy.pop(key)
            if what == "renamed" and isinstance(copy, dict):
                copy[draw(st.sampled_from(["", "..", "\0", "step", "__metadata__", "x" * 99]))] = taken
        return copy
    return draw(st.sampled_from([*LIES, *lies]))


@st.composite
def hostile(draw: Any, kind: Kind) -> bytes:
    """The bytes of a file that is not what it says."""
    content = kind.written(draw(changed(kind.says, kind.lies)) if draw(st.booleans()) else kind.says)
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.integers(0, len(content))), draw(st.integers(0, 9))
        content = content[:at] + draw(st.binary(max_size=9)) + content[at + size :]
    return content


@functools.cache
def bombs() -> dict[str, bytes]:
    """Small files that would take much, by the names of those who read them."""

    def zipped(shape: str, data: bytes) -> bytes:
        file = io.BytesIO()
        header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
        array = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("about.npy", array)
        return file.getvalue()

    deep = b"[" * 100_000
    huge = {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}
    return {
        "axes/state.npz": zipped("(" + "4294967296," * 30 + ")", bytes(8)),
        "length/model.safetensors": (2**63).to_bytes(8, "little") + b"{}",
        "long/model.safetensors": (99_000_000).to_bytes(8, "little") + b"{}",
        "shape/model.safetensors": safetensors({"w": huge}),
        "deep/model.safetensors": len(deep).to_bytes(8, "little") + deep,
        "deep/runs.jsonl": deep + b"\n",
        "within/runs.jsonl": b'{"run": ' + deep + b"\n",
        "unhashable/option": b"{[]: 1}",
        "deep/option": deep,
        "unhashable/runs.jsonl": record({"run": {**RUN, "task": ["a"]}, "result": RESULT, "where": {}}),
    }


def resident() -> int:
    """The most memory that this process has had, with that which tracemalloc does not see; 0 where nobody tells."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tried(kind: Kind, path: Path, *, memory: bool = True) -> str | None:
    """What is wrong with the reader, or None: it read the file, or refused it as it should."""
    highest, size = resident(), path.stat().st_size
    fault, took, peak = attempt(kind, path, memory=memory)
    beyond = resident() - highest - UNTRACED if memory else 0
    if peak > FACTOR * size + BESIDE:  # again: what is imported or remembered at first use is not the file's
        peak = min(peak, attempt(kind, path, memory=memory)[2])
    if took > SECONDS:
        fault = f"it took {took:.1f} s"
    if max(peak, beyond) > FACTOR * size + BESIDE:
        fault = f"it took {max(peak, beyond):,} bytes for a file of {size:,}"
    return fault


def attempt(kind: Kind, path: Path, *, memory: bool) -> tuple[str | None, float, int]:
    """What is wrong with how it ended, the seconds that it took, and the bytes."""
    fault = None
    if memory:
        tracemalloc.start()
    begun = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file may be of an earlier version
            kind.read(path)
    except (OptimError, CommandError) as refused:
        fault = None if str(refused) else "an error without a word"
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    took = time.process_time() - begun
    peak = tracemalloc.get_traced_memory()[1] if memory else 0
    if memory:
        tracemalloc.stop()
    return fault, took, peak
