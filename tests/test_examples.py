"""The examples run, on tiny sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from day import BY_DAY
from tolerances import PRINTED

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow
many_processes = pytest.mark.skipif(BY_DAY, reason="make test-all starts so many")


def test_a_race_on_a_task_of_your_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for needed in ("torch.nn", "click", "plotly"):
        pytest.importorskip(needed)
    from thalweg.cli import run

    monkeypatch.chdir(ROOT / "examples")
    asked = ["own_task:task", "--optimizers", "adamw,kron", "--steps", "3", "--json", "--out", str(tmp_path)]
    assert run(["race", *asked]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert len(results) == 2
    assert all(one["loss"] < one["curve"]["loss"][0] for one in results)


def test_pictures_are_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import draw_race
    import valley

    from thalweg.race import race

    path = valley.walk(valley.VALLEYS[0], "Kron", 0.01)
    assert (path == valley.walk(valley.VALLEYS[0], "Kron", 0.01)).all()
    assert valley.VALLEYS[0].height(*path[-1]) < valley.VALLEYS[0].height(*path[0])
    summary = race("digits", optimizers=["SGD", "LAMB"], options={"": {"lr": 0.05}}, steps=5, seeds=2).run().summary
    for name in ("first.svg", "second.svg"):
        draw_race.draw_race(summary, str(tmp_path / name))
    picture = (tmp_path / "first.svg").read_text()
    assert picture == (tmp_path / "second.svg").read_text()
    assert "LAMB  lr 0.05" in picture


def test_jax_over_devices() -> None:
    pytest.importorskip("optax")
    command = [sys.executable, str(ROOT / "examples" / "jax_sharded.py"), "--optimizer", "lamb", "--steps", "3"]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=3"  # the example's own counts
    surroundings = {**os.environ, "XLA_FLAGS": flags}
    result = subprocess.run([*command, "--devices", "2"], capture_output=True, text=True, check=False, env=surroundings)
    assert result.returncode == 0, result.stderr
    first, last = (float(line.rpartition(" ")[2]) for line in result.stdout.splitlines())
    assert last < first


def trained(ranks: int, example: str, *arguments: str) -> dict[int, float]:
    """The losses that an example writes, by step."""
    pytest.importorskip("torch.distributed.checkpoint")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = str(ROOT / "examples" / example)
    result = subprocess.run([*command, script, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return {int(step.rstrip(":")): float(loss) for _, step, _, loss in lines}


@many_processes
def test_fsdp2_and_tensor_parallelism_are_one_training(tmp_path: Path) -> None:
    arguments = ("--optimizer", "Adafactor", "--steps", "5")
    sharded = trained(2, "fsdp2.py", *arguments, "--out", str(tmp_path / "saved"))
    assert sharded[5] < sharded[1]
    assert (tmp_path / "saved" / ".metadata").exists()
    assert sharded == pytest.approx(trained(2, "tensor_parallel.py", *arguments), abs=PRINTED)


@many_processes
@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "LARS"), (4, "Kron")])
def test_tensor_parallelism_equals_one_rank(ranks: int, optimizer: str) -> None:
    arguments = ("--optimizer", optimizer, "--steps", "5")
    parallel = trained(ranks, "tensor_parallel.py", *arguments, "--parallel", "2")
    assert parallel[5] < parallel[1]
    assert parallel == pytest.approx(trained(1, "fsdp2.py", *arguments), abs=PRINTED)


@many_processes
def test_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    def resumed(ranks: int, folder: str, stop: int) -> dict[int, float]:
        arguments = ("--optimizer", "LAMB", "--steps", "4", "--every", "1", "--stop", str(stop))
        return trained(ranks, "resume_elsewhere.py", *arguments, "--out", str(tmp_path / folder))

    first, second = resumed(2, "turns", 2), resumed(4, "turns", 4)
    assert [list(first), list(second)] == [[1, 2], [3, 4]]
    assert first | second == pytest.approx(resumed(1, "at once", 4), abs=PRINTED)
