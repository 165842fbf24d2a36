"""What comes from outside and lies is refused with a word, soon, and without taking memory.

Files are whole ones with other bytes or with a lie in one place; states in memory are whole ones with such a lie.
"""

from __future__ import annotations

import io
import json
import os
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import thalweg.numpy
import thalweg.torch
from thalweg.errors import CommandError, OptimError, StateError
from thalweg.plan.models import load_model
from thalweg.race.run import read_records

pytest.importorskip("safetensors")

#: Of processor time and of memory: so many times what is read, and what any reading takes.
SECONDS, FACTOR, BESIDE = 1.0, 64, 4_000_000
#: By how much a process may grow beside what tracemalloc sees, for reasons of its own.
UNTRACED = 100_000_000
LIES: list[Any] = [-1, 0, 2**31, 2**63, 10**30, 1e308, True, None, "", "..", "../../etc/passwd", "a\0b", "<script>"]
LIES += ["x" * 1000, [], {}, [[[]]], {"": None}, [2**62, 2**62], ["a"] * 100, "float64", "int8", "object"]
NAMES = ["", "..", "\0", "step", "__metadata__", "x" * 99]
SHAPES = {"a": (3, 2), "b": (4,), "coded": (64, 64)}
#: A gigabyte for whoever copies it: one number seen many times.
WIDE = np.broadcast_to(1.0, [2**27])


def resident() -> int:
    """The most memory that this process has had, with that which tracemalloc does not see; 0 where nobody tells."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def refusal(size: int | None = None) -> Iterator[None]:
    """Reads what is given, or refuses it with a word, soon. size: of what is given, to look at memory too."""
    if size is not None:
        tracemalloc.start()
    begun, highest, said = time.process_time(), resident(), "read"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it may be of an earlier version
            yield
    except (OptimError, CommandError) as refused:
        said = str(refused)
    finally:
        took, peak, beyond = time.process_time() - begun, tracemalloc.get_traced_memory()[1], resident() - highest
        tracemalloc.stop()
    assert said
    assert took <= SECONDS
    assert size is None or max(peak, beyond - UNTRACED) <= FACTOR * size + BESIDE


@st.composite
def changed(draw: Any, value: Any, lies: Sequence[Any] = ()) -> Any:
    """A copy of a value with a lie in one place."""
    if isinstance(value, (dict, list, tuple)) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(list(value) if isinstance(value, dict) else range(len(value))))
        parts: Any = dict(value) if isinstance(value, dict) else list(value)
        what = draw(st.sampled_from(["deeper", "deeper", "deeper", "without", "renamed"]))
        taken = parts.pop(key) if what != "deeper" else parts[key]
        if what == "deeper":
            parts[key] = draw(changed(taken, lies))
        elif what == "renamed" and isinstance(parts, dict):
            parts[draw(st.sampled_from(NAMES))] = taken
        return tuple(parts) if isinstance(value, tuple) else parts
    return draw(st.sampled_from([*LIES, *lies]))


def changed_at(value: Any, path: Sequence[Any], to: Any) -> Any:
    """A copy of a value with another one in one place."""
    if not path:
        return to
    parts = dict(value) if isinstance(value, dict) else dict(enumerate(value))
    parts[path[0]] = changed_at(parts.get(path[0]), path[1:], to)
    return parts if isinstance(value, dict) else [*parts.values()]


# ---- files


class Source(NamedTuple):
    """What is read: what a whole one says, who reads it, and how it is written, if it is a file."""

    says: Any
    read: Callable[[Any], Any]
    written: Callable[[Any], bytes] | None = None


def of_numpy() -> Any:
    optimizer = thalweg.numpy.LAMB(lr=0.1, state_dtype="int8")
    arrays = {name: np.ones(shape, "float32") for name, shape in SHAPES.items()}
    optimizer.step({name: x.copy() for name, x in arrays.items()}, arrays)
    return optimizer


def npz(about: Any) -> bytes:
    """A state of numpy's front end with another description."""
    file = io.BytesIO()
    np.savez(file, about=np.array(json.dumps(about)), **saved_arrays()[1])
    return file.getvalue()


@cache
def saved_arrays() -> tuple[Any, dict[str, Any]]:
    """The description and the arrays of a state that numpy's front end has saved."""
    path = Path(os.environ["TMPDIR"], "whole.npz")
    of_numpy().save(path)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("about"))), arrays


def safetensors(header: Any) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)


def pickled(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def lines(content: Any) -> bytes:
    return (json.dumps(content) + "\n").encode()


HEADER = {"w": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]}}
HEADER |= {"b": {"dtype": "BF16", "shape": [16], "data_offsets": [32, 64]}, "__metadata__": {"format": "pt"}}
RUN = dict(task="t", fingerprint="f", contestant="c", optimizer="o", lr=0.1, seed=0, batch_size=None, steps=1)
RESULT = dict(step=[0, 1], seconds=[0.0, 1.0], loss=[1.0, None], score=None, parameters=1, state_bytes=1)
RECORD = {"run": {**RUN, "engine": "auto", "device": "cpu", "thalweg": "0"}}
RECORD |= {"result": {**RESULT, "engine": "auto"}, "where": {}}


def parameters() -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in SHAPES.items()]


def made(rule: str, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(parameters(), **options)


def stepped(make: Callable[..., Any], **options: Any) -> Any:
    """The state of an optimizer of torch after a step."""
    named = parameters()
    optimizer = make(named, **options)
    for _, p in named:
        p.grad = torch.ones_like(p)
    optimizer.step()
    return optimizer.state_dict()


FILES = ["state.npz", "model.safetensors", "optimizer.pt", "runs.jsonl"]


@cache
def sources() -> dict[str, Source]:
    """Every kind of file, and a state in memory that torch.load may have read."""
    lamb: dict[str, Any] = dict(lr=0.1, state_dtype="int8")
    return {
        "state.npz": Source(saved_arrays()[0], lambda path: of_numpy().load(path), npz),
        "model.safetensors": Source(HEADER, lambda path: load_model(str(path)), safetensors),
        "optimizer.pt": Source(
            stepped(torch.optim.AdamW), lambda path: thalweg.torch.import_peer(made("AdamW"), path), pickled
        ),
        "runs.jsonl": Source(RECORD, read_records, lines),
        "torch": Source(stepped(thalweg.torch.LAMB, **lamb), lambda state: made("LAMB", **lamb).load_state_dict(state)),
    }


@st.composite
def hostile(draw: Any, name: str, file: Source) -> Any:
    """The bytes of a file that is not what it says, or a state of torch with a lie."""
    if file.written is None:
        return draw(changed(file.says, [torch.ones((3, 2), dtype=torch.int8), torch.from_numpy(WIDE)]))
    content = file.written(draw(changed(file.says)) if draw(st.booleans()) else file.says)
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.integers(0, len(content))), draw(st.integers(0, 9))
        content = content[:at] + draw(st.binary(max_size=9)) + content[at + size :]
    return content


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", [*FILES, "torch"])
def test_what_is_whole_is_read_and_what_lies_is_refused(name: str, tmp_path: Path) -> None:
    path, source = tmp_path / name, sources()[name]

    def place(content: Any) -> Any:
        if source.written is None:
            return content
        path.write_bytes(content)
        return path

    source.read(place(source.says if source.written is None else source.written(source.says)))

    @given(st.data())
    def look(data: st.DataObject) -> None:
        content = place(data.draw(hostile(name, source)))
        with refusal():
            source.read(content)

    look()


def array_of(shape: str) -> bytes:
    """A compressed archive of one array that is said to have a shape."""
    file = io.BytesIO()
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("about.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(8))
    return file.getvalue()


DEEP = b"[" * 100_000
HUGE = {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 0]}}
#: Small files that would take much.
BOMBS = {
    "axes/state.npz": array_of("(" + "4294967296," * 30 + ")"),
    "length/model.safetensors": (2**63).to_bytes(8, "little") + b"{}",
    "long/model.safetensors": (99_000_000).to_bytes(8, "little") + b"{}",
    "shape/model.safetensors": safetensors(HUGE),
    "deep/model.safetensors": len(DEEP).to_bytes(8, "little") + DEEP,
    "within/runs.jsonl": b'{"run": ' + DEEP + b"\n",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_small_file_takes_little(bomb: str, tmp_path: Path) -> None:
    name = bomb.partition("/")[2]
    file, path = sources()[name], tmp_path / name
    path.write_bytes(file.written(file.says))
    file.read(path)  # what is imported or remembered at first use is not the file's
    path.write_bytes(BOMBS[bomb])
    with refusal(len(BOMBS[bomb])):
        file.read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["state.npz", "model.safetensors", "runs.jsonl", "folder of model.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    read = sources()[name.split()[-1]].read
    path = tmp_path / name.split()[-1]
    os.mkfifo(path)
    with pytest.raises((OptimError, CommandError), match=r"not a file|no file"):
        read(tmp_path if name.startswith("folder") else path)


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="links need a privilege there")
def test_saving_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / f".state.npz.{os.getpid()}.part").symlink_to(tmp_path / "precious")
    of_numpy().save(tmp_path / "state.npz")
    assert (tmp_path / "precious").read_text() == "kept"
    of_numpy().load(tmp_path / "state.npz")


# ---- states in memory

#: States that would take much, or whose errors once were not ours: where they lie, and what is said of it.
LIARS: list[tuple[tuple[Any, ...], Any, str]] = [
    (("state", 0, "step"), WIDE, "step.* of 'a' must be a whole number"),
    (("state", 0, "step"), np.array(-3.0), r"state\['step'\] of 'a' must be a whole number >= 0"),
    (("state", 0, "step"), np.array(np.nan), r"state\['step'\] of 'a' must be a whole number >= 0"),
    (("state", 0, "exp_avg"), np.full((3, 2), 1j), "the state of 'a' must be arrays of floating point"),
    (("state", 0, "exp_avg"), np.ones((3, 2), bool), "the state of 'a' must be arrays of floating point"),
    (("state", 0, "more"), 3, "is damaged"),
    (("state", 2, "exp_avg_scale"), np.zeros((64, 1), "float32"), "'exp_avg_scale' has a 0 for codes of 'exp_avg'"),
    (("param_groups",), [3], "must be mappings in a list"),
    (("param_groups", 0, "layout"), "new", "layout of a saved state must be a whole number from 1, got 'new'"),
    (("param_groups", 0, "rule"), 10**30, "must be the name of one"),
]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize(("path", "lie", "said"), LIARS)
def test_a_small_state_takes_little(path: tuple[Any, ...], lie: Any, said: str) -> None:
    state, load, _ = sources()["torch"]
    load(state)
    lying = changed_at(state, path, torch.from_numpy(lie) if isinstance(lie, np.ndarray) else lie)
    with refusal(0), pytest.raises(StateError, match=said):
        load(lying)
