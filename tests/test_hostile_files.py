"""Files that lie are refused with a word, soon, and without taking memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostile_files import Kind, bombs, hostile, kinds, optimizer, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thalweg.errors import CommandError, OptimError, StateError
from thalweg.plan.load import load_model

NAMES = ["state.npz", "model.safetensors", "runs.jsonl"]
NAMES += ["compiled", "option"]
STATES = ["adamw.torch.json", "own.torch.json", "own.numpy.json", "adamw.optax.json"]
#: What reading a kind needs, by how its name ends.
NEEDED = {"model.safetensors": ["safetensors", "torch"]}
NEEDED |= {name: ["torch", "optax"] for name in STATES}


def kind_of(name: str, folder: Path) -> Kind:
    """The kind of a name, or a skip where what reads it is not installed."""
    for needed, packages in NEEDED.items():
        if name.endswith(needed):
            for package in packages:
                pytest.importorskip(package)
    if name in STATES:
        from hostile_states import states

        return states()[name]
    return kinds(folder)[name]


@pytest.mark.parametrize("bomb", bombs())
def test_a_small_file_takes_little(bomb: str, tmp_path: Path) -> None:
    kind = kind_of(bomb.partition("/")[2], tmp_path)
    path = tmp_path / kind.name
    path.write_bytes(bombs()[bomb])
    assert tried(kind, path) is None


def test_a_small_state_takes_little(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("optax")
    from hostile_states import bombs_of_states, states

    known = states()
    for name, (content, said) in bombs_of_states(known).items():
        kind = known[name.partition("/")[2]]
        (tmp_path / kind.name).write_bytes(content)
        assert tried(kind, tmp_path / kind.name) is None, name
        with pytest.raises(StateError, match=said):
            kind.read(tmp_path / kind.name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *STATES])
def test_what_is_whole_is_read_and_no_lie_gets_an_exception_of_another_kind(name: str, tmp_path: Path) -> None:
    kind = kind_of(name, tmp_path)
    path = tmp_path / name
    path.write_bytes(kind.written(kind.says))
    kind.read(path)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def look(data: st.DataObject) -> None:
        path.write_bytes(data.draw(hostile(kind)))
        assert tried(kind, path, memory=False) is None

    look()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["state.npz", "model.safetensors", "runs.jsonl"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    kind = kind_of(name, tmp_path)
    os.mkfifo(tmp_path / name)
    with pytest.raises((OptimError, CommandError), match=r"not a file|no file"):
        kind.read(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_the_folder_of_a_model_is_not_waited_for(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    pytest.importorskip("torch")
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CommandError, match="is not a file"):
        load_model(str(tmp_path))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="links need a privilege there")
def test_saving_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / f".state.npz.{os.getpid()}.part").symlink_to(tmp_path / "precious")
    optimizer().save(tmp_path / "state.npz")
    assert (tmp_path / "precious").read_text() == "kept"
    optimizer().load(tmp_path / "state.npz")
