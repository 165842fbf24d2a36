"""benchmarks/step.py: every rule and its peers step in turns, with new gradients, into a table and a record."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from day import BY_DAY

pytest.importorskip("torch")
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks/step.py"
SHAPES = {"h.0.weight": (6, 4), "h.1.weight": (6, 4), "h.1.bias": (6,), "wte.weight": (9, 4)}
FAST = ["--rounds", "2", "--model", "small"]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with tiny shapes, without peers that compile for minutes."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    module = importlib.import_module("step")
    monkeypatch.setattr(module, "BUILT_IN", dict.fromkeys(module.BUILT_IN, SHAPES.items))
    monkeypatch.setattr(module, "COPIED", 2**16)
    monkeypatch.setattr(module, "LOOP", 2)
    monkeypatch.setattr(module, "PEERS", [peer for peer in module.PEERS if peer[0] != "Kron"])
    return module


def run(script: ModuleType, folder: Path, arguments: Sequence[str]) -> Any:
    script.main([*FAST, *arguments, "--json", str(folder / "step.json")])
    return json.loads((folder / "step.json").read_text())


@pytest.mark.slow
def test_every_rule_is_measured_beside_its_peers(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run(script, tmp_path, ["--optimizers", "all"])
    shown = capsys.readouterr().out
    assert [table["rule"] for table in record["tables"]] == list(script.RULES)
    for table in record["tables"]:
        assert next(iter(table["rows"])) == f"thalweg {table['rule']}"
        assert "torch AdamW fused=True" in table["rows"]
        assert all("No module named" in reason for reason in table["left_out"].values()), table["left_out"]
        for name, row in table["rows"].items():
            first, third = row["step"]["quartiles"]
            assert 0 < first <= row["step"]["median"] <= third
            assert f"\n{name}" in shown
    moved = {table["rule"]: table["bytes_moved"] for table in record["tables"]}
    assert (moved["AdamW"], moved["Muon"], moved["Kron"], moved["SOAP"]) == (28 * (24 + 24 + 6 + 36), None, None, None)
    assert {"date", "command", "cpu", "device", "versions", "copied_bytes_per_s"} < set(record)


@pytest.mark.slow
def test_jax_is_measured_by_calls_and_by_loops(script: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("optax")
    (table,) = run(script, tmp_path, ["--front-end", "jax", "--optimizers", "sgd"])["tables"]
    assert list(table["rows"]) == ["thalweg SGD, make_step", "thalweg SGD, update", "optax sgd", "optax adamw"]
    assert all(row["step"]["median"] > 0 and row["loop"]["median"] > 0 for row in table["rows"].values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--optimizers lamp", "there is no rule 'lamp': here are "),
        ("--optimizers lamb --option momentum=0.9", "--option momentum: lamb has no such option"),
        ("--rounds 1", "--rounds must be at least 2, got 1"),
    ],
)
def test_a_mistake_is_one_sentence(
    script: ModuleType, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.main(arguments.split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(BY_DAY, reason="make test-all starts so many processes")
def test_ranks_are_measured_in_processes_of_their_own() -> None:
    command = [sys.executable, str(SCRIPT), *FAST, "--ranks", "2", "--optimizers", "sgd"]
    assert "\nthalweg SGD" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
