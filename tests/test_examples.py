"""The examples run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def test_a_race_on_a_task_of_your_own(tmp_path: Path) -> None:
    for needed in ("torch.nn", "click", "matplotlib", "plotly"):
        pytest.importorskip(needed)
    command = [
        sys.executable,
        "-m",
        "thalweg",
        "race",
        "own_task:task",
        "--steps",
        "3",
        "--json",
        "--out",
        str(tmp_path),
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT / "examples")
    assert result.returncode == 0, result.stderr
    (course,) = json.loads(result.stdout)["courses"]
    assert len(course["results"]) == 6
    assert all(one["loss"] < one["curve"]["loss"][0] for one in course["results"])


@pytest.mark.parametrize("optimizer", ["adafactor", "kron"])
def test_jax_over_devices(optimizer: str) -> None:
    pytest.importorskip("optax")
    command = [sys.executable, str(ROOT / "examples" / "jax_sharded.py"), "--optimizer", optimizer, "--steps", "3"]
    result = subprocess.run([*command, "--devices", "2"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, last = (float(line.rpartition(" ")[2]) for line in result.stdout.splitlines())
    assert last < first
