"""The scripts under benchmarks/: they are thin, and they run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
from bench_cases import TINY

from thalweg.bench import quiet, run
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
