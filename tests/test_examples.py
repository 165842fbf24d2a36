"""The examples run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", ["train_text.py", "train_digits.py"])
def test_training(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch.nn")
    out = tmp_path / "curves.json"
    command = [sys.executable, str(ROOT / "examples" / script), "--steps", "3", "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Kron" in json.dumps(json.loads(out.read_text()))


@pytest.mark.parametrize("optimizer", ["adafactor", "kron"])
def test_jax_over_devices(optimizer: str) -> None:
    pytest.importorskip("optax")
    command = [sys.executable, str(ROOT / "examples" / "jax_sharded.py"), "--optimizer", optimizer, "--steps", "3"]
    result = subprocess.run([*command, "--devices", "2"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, last = (float(line.rpartition(" ")[2]) for line in result.stdout.splitlines())
    assert last < first
