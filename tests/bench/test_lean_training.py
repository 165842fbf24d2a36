"""The benchmark of training in few bits: it runs, resumes, and tells what was recorded."""

from __future__ import annotations

import importlib
import shutil
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

from thalweg.race.contest import RECORDS
from thalweg.race.records import Book

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results/lean_training"
TINY = ["--device", "cpu", "--width", "32", "--layers", "1", "--context", "8", "--batch", "2", "--steps", "3"]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.lean_training")


@pytest.mark.nightly
def test_it_runs_once_and_goes_on_with_more_seeds(
    lean: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, leanest = "float32 weights, float32 state", "bfloat16 weights, compensated, int8 state"
    given = [*TINY, "--text", "50000", "--contestants", f"{plain};{leanest}"]
    lean.main([*given, "--records", str(tmp_path), "--seeds", "1"])
    first = list(Book(tmp_path / "text" / RECORDS).records)
    ran = {(run.contestant, run.lr) for run in first}
    assert ran == {(name, lr) for lr in (0.02, 0.0025) for name in (plain, leanest)}
    assert "| bfloat16 weights, compensated, int8 state |" in capsys.readouterr().out
    lean.main([*given, "--records", str(tmp_path), "--seeds", "2"])
    second = list(Book(tmp_path / "text" / RECORDS).records)
    assert second[: len(first)] == first
    assert [run.seed for run in second] == [0] * 4 + [1] * 4


def test_drawing_runs_nothing_and_makes_the_picture_again(
    lean: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lean, "train_all", None)
    shutil.copytree(RESULTS, tmp_path / "records")
    lean.main(["--records", str(tmp_path / "records"), "--draw", str(tmp_path / "lean.svg")])
    assert "nats a byte" in (tmp_path / "lean.svg").read_text()
    rows = capsys.readouterr().out.splitlines()
    assert (
        "| bfloat16 weights, nearest | 10.00 | **1.49** (1.486, 1.498, 1.485) | **2.197** (2.218, 2.198, 2.175) |"
        in rows
    )
    assert "| float32 weights, int8 state | 6.14 | **93.5** (93.33, 93.73, 93.44) |" in rows


def test_a_convnet_without_data_is_refused(lean: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lean.main(["--tasks", "text,convnet", "--records", "nowhere"])
    assert "the convnet needs --data" in capsys.readouterr().err
