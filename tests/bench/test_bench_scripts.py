"""The scripts under benchmarks/: they are thin, and they run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from bench_cases import TINY

from thalweg.bench import quiet, run
from thalweg.race.contest import RECORDS
from thalweg.race.records import Book
from thalweg.show import devices
from thalweg.show.devices import Device

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def script(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "release_memory", lambda self: None)
    monkeypatch.setattr(quiet, "count_busy_elsewhere", lambda: 0.0)
    monkeypatch.setattr(run, "resolve", lambda name, dtype: TINY)
    monkeypatch.setattr(devices, "prepare_process", lambda device, threads=None: None)
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lean_step", "step_jax"])
def test_help(name: str) -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True, check=True
    )
    assert "--models" in run.stdout


def test_muon(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record, size = tmp_path / "muon.json", ["--models", "GPT-2", "--scale", "96", "--repeats", "1", "--calls", "1"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mkldnn_matmul failed")
        script("muon").main(["--device", "cpu", *size, "--json", str(record)])
    (rows,) = json.loads(record.read_text()).values()
    assert {"thalweg, ns_method='plain'", "thalweg, ns_method='auto'", "torch.optim.Muon"} < set(rows)
    assert "| torch.optim.Muon |" in capsys.readouterr().out


@pytest.mark.nightly
def test_matrices_jax(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optax")
    script("matrices_jax").main(["--layers", "1", "--width", "12", "--solvers", "muon", "--steps", "1"])
    assert "\n| muon | " in capsys.readouterr().out


def test_products() -> None:
    """A symmetric product counts half, errors are seen, and a floor counts what is multiplied."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    products = script("products")
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    half, whole = (products.Case("x x^T", x, x.mT, None, symmetric) for symmetric in (True, False))
    assert 2 * half.flops() == whole.flops() == 2 * 2 * 8 * 16 * 8
    assert half.error(half.run_library()) < 1e-15
    assert half.error(1.01 * half.run_library()) == pytest.approx(0.01)
    added = products.Case("r r + r", x @ x.mT, x @ x.mT, x @ x.mT, True)
    assert added.error(added.run_library()) < 1e-15
    assert products.floor_of("GPT-2", "auto") < products.floor_of("GPT-2", "plain")


@pytest.mark.nightly
def test_step_jax(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("optax")
    record = tmp_path / "record.json"
    script("step_jax").main(["--models", "gpt2", "--rules", "sgd", "--repeats", "1", "--json", str(record)])
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| sgd | tiny |")
    assert row.count("|") == 13
    assert json.loads(record.read_text())["loop"][0]["inner"] == 20


@pytest.mark.nightly
def test_the_training_loop(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    loop = script("loop")
    loop.main(["--turns", "1", "--width", "8"])
    rows = capsys.readouterr().out.splitlines()
    assert rows[-3].startswith("| torch.optim.AdamW(fused=True) |")
    assert rows[-1].startswith('| thalweg.torch LAMB(engine="foreach") | foreach |')


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    script("bandwidth").main(["--mib", "1", "--repeats", "1"])
    assert "| 1 | 1 |" in capsys.readouterr().out


def test_lean_step_says_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"lean_step\.py: there is no device 'cuda'"):
        script("lean_step").main([])


def test_lean_state_keeps_updates_and_trust_ratios() -> None:
    """The experiment of docs/lean_state.md, on a small matrix."""
    lean = script("lean_state")
    found = {row.name: lean.off(row, steps=300, shape=(32, 256)) for row in lean.ROWS if row.name in LIMITS}
    for name, (update, ratio) in LIMITS.items():
        assert found[name].update < update
        assert found[name].ratio < ratio


#: Percent.
LIMITS = {"**int8** momentum alone": (3, 0.1), "**int8, uint8**": (7, 1)}


# ---- training in few bits

RESULTS = FOLDER / "results/lean_training"
SHORT = ["--device", "cpu", "--width", "32", "--layers", "1", "--context", "8", "--batch", "2", "--steps", "3"]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    pytest.importorskip("torch")
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    return importlib.import_module("benchmarks.lean_training")


@pytest.mark.nightly
def test_it_runs_once_and_goes_on_with_more_seeds(
    lean: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, leanest = "float32 weights, float32 state", "bfloat16 weights, compensated, int8 state"
    given = [*SHORT, "--text", "50000", "--contestants", f"{plain};{leanest}"]
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
