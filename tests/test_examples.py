"""The examples run, on tiny sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tolerances import PRINTED

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


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("kron", marks=pytest.mark.nightly)])
def test_jax_over_devices(optimizer: str) -> None:
    pytest.importorskip("optax")
    command = [sys.executable, str(ROOT / "examples" / "jax_sharded.py"), "--optimizer", optimizer, "--steps", "3"]
    result = subprocess.run([*command, "--devices", "2"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, last = (float(line.rpartition(" ")[2]) for line in result.stdout.splitlines())
    assert last < first


def over_ranks(ranks: int, example: str, *arguments: str) -> dict[int, float]:
    """The losses that an example writes, by step."""
    pytest.importorskip("torch.distributed.checkpoint")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(ROOT / "examples" / example)
    result = subprocess.run([*command, script, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return {int(step.rstrip(":")): float(loss) for _, step, _, loss in lines}


@pytest.mark.world
def test_fsdp2(tmp_path: Path) -> None:
    losses = over_ranks(2, "fsdp2.py", "--optimizer", "LARS", "--steps", "5", "--out", str(tmp_path / "saved"))
    assert losses[5] < losses[1]
    assert (tmp_path / "saved" / ".metadata").exists()


@pytest.mark.world
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "Adafactor"), pytest.param(4, "Kron", marks=pytest.mark.nightly)])
def test_tensor_parallel_equals_one_rank(ranks: int, optimizer: str) -> None:
    arguments = ("--optimizer", optimizer, "--steps", "5")
    parallel = over_ranks(ranks, "tensor_parallel.py", *arguments, "--parallel", "2")
    assert parallel[5] < parallel[1]
    assert parallel == pytest.approx(over_ranks(1, "fsdp2.py", *arguments), abs=PRINTED)


@pytest.mark.world
@pytest.mark.nightly
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    def trained(ranks: int, folder: str, stop: int) -> dict[int, float]:
        arguments = ("--optimizer", "LAMB", "--steps", "4", "--every", "1", "--stop", str(stop))
        return over_ranks(ranks, "resume_elsewhere.py", *arguments, "--out", str(tmp_path / folder))

    first, second = trained(2, "turns", 2), trained(4, "turns", 4)
    assert [list(first), list(second)] == [[1, 2], [3, 4]]
    assert first | second == pytest.approx(trained(1, "at once", 4), abs=PRINTED)
