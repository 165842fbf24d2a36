"""The benchmark of training in few bits: it runs, resumes, and tells what was recorded."""

from __future__ import annotations

import importlib
import json
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--device", "cpu", "--width", "32", "--layers", "1", "--context", "8", "--batch", "2", "--steps", "3"]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    module = importlib.import_module("benchmarks.lean_training")
    monkeypatch.setattr(module, "TEXT_BYTES", 50_000)
    return module


def test_it_runs_once_and_goes_on_with_more_seeds(
    lean: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, leanest = "float32 weights, float32 state", "bfloat16 weights, compensated, int8 state"
    monkeypatch.setattr(lean, "CONTESTANTS", {name: lean.CONTESTANTS[name] for name in (plain, leanest)})
    lean.main([*TINY, "--records", str(tmp_path), "--seeds", "1"])
    first = json.loads((tmp_path / "text.json").read_text())
    assert [(run["contestant"], run["lr"]) for run in first["runs"]] == [
        (name, lr) for lr in lean.RATES["text"] for name in (plain, leanest)
    ]
    assert "| bfloat16 weights, compensated, int8 state |" in capsys.readouterr().out
    lean.main([*TINY, "--records", str(tmp_path), "--seeds", "2"])
    second = json.loads((tmp_path / "text.json").read_text())
    assert second["runs"][: len(first["runs"])] == first["runs"]
    assert [run["seed"] for run in second["runs"]] == [0] * 4 + [1] * 4


RECORD = {
    "task": "text",
    "about": "nats a byte; 2 layers",
    "steps": 2,
    "batch_size": 8,
    "parameters": 100,
    "device": "cpu",
    "torch": "2",
    "runs": [
        {"contestant": name, "lr": 0.02, "seed": seed, "test": test, "state_bytes": 800, "curve": [[1, 4.0], [2, 3.0]]}
        for name, tests in {
            "float32 weights, float32 state": (2.0, 2.1),
            "bfloat16 weights, nearest": (2.5, None),
        }.items()
        for seed, test in enumerate(tests)
    ],
}


def test_the_table_has_every_seed_and_says_who_diverged(lean: types.ModuleType) -> None:
    rows = lean.table(RECORD).splitlines()
    assert rows[-2:] == [
        "| float32 weights, float32 state | 12.00 | **2.05** (2, 2.1) |",
        "| bfloat16 weights, nearest | 10.00 | diverged (2.5, -) |",
    ]


def test_drawing_runs_nothing(
    lean: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(lean, "train_all", None)
    (tmp_path / "text.json").write_text(json.dumps(RECORD))
    lean.main(["--records", str(tmp_path), "--draw", str(tmp_path / "lean.svg")])
    assert "nats a byte" in (tmp_path / "lean.svg").read_text()
    assert "## text" in capsys.readouterr().out


def test_a_convnet_without_data_is_refused(lean: types.ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lean.main(["--tasks", "text,convnet", "--records", "nowhere"])
    assert "the convnet needs --data" in capsys.readouterr().err
