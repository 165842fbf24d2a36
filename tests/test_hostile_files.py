"""Files that lie are refused with a word, soon, and without taking memory. ``make fuzz`` looks for longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hostile_files import bombs, hostile, kinds, tried
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thalweg.errors import CommandError, OptimError

NAMES = ["state.npz", "model.safetensors", "model.safetensors.index.json", "shapes.json", "config.json", "runs.jsonl"]
NAMES += ["race.json"]


@pytest.fixture(autouse=True)
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its own time; what reaches it was checked before."""
    monkeypatch.setattr("thalweg.plan.library.built", lambda *_: None)


@pytest.mark.parametrize("bomb", bombs())
def test_a_small_file_takes_little(bomb: str, tmp_path: Path) -> None:
    kind = kinds(tmp_path)[bomb.partition("/")[2]]
    path = tmp_path / kind.name
    path.write_bytes(bombs()[bomb])
    assert tried(kind, path) is None


@pytest.mark.parametrize("name", NAMES)
def test_what_is_whole_is_read(name: str, tmp_path: Path) -> None:
    kind = kinds(tmp_path)[name]
    path = tmp_path / name
    path.write_bytes(kind.written(kind.says))
    kind.read(path)


@pytest.mark.parametrize("name", NAMES)
def test_no_lie_gets_an_exception_of_another_kind(name: str, tmp_path: Path) -> None:
    kind = kinds(tmp_path)[name]
    path = tmp_path / name

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def look(data: st.DataObject) -> None:
        path.write_bytes(data.draw(hostile(kind)))
        assert tried(kind, path, memory=False) is None

    look()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
@pytest.mark.parametrize("name", ["state.npz", "model.safetensors"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    kind = kinds(tmp_path)[name]
    os.mkfifo(tmp_path / name)
    with pytest.raises((OptimError, CommandError), match=r"not a file|no file"):
        kind.read(tmp_path / name)
