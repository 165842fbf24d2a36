"""A race that comes to nothing leaves nothing behind, and touches nothing that was there before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import RECORDS, race
from thalweg.race.task import Run

TASK = ArrayTask(
    name="parabola",
    init=lambda seed: {"x": np.ones(3)},
    gradients=lambda params, batch: {"x": 2 * params["x"]},
    evaluate=lambda params: float(np.square(params["x"]).sum()),
    steps=4,
    seeds=1,
)


def interrupted(run: Run, step: int, loss: float | None) -> None:
    raise KeyboardInterrupt


def failing(*arguments: Any) -> Any:
    raise RuntimeError("no")


#: Why a race came to nothing: what was asked for, what is done at each measure, and what is raised.
FAILURES: dict[str, tuple[dict[str, Any], Any, type[BaseException]]] = {
    "a task whose init raises": (dict(task=replace(TASK, init=failing)), None, CommandError),
    "a task whose gradients raise": (dict(task=replace(TASK, gradients=failing)), None, CommandError),
    "an engine that is not there": (dict(task=TASK, engine="warp"), None, CommandError),
    "a device that is not there": (dict(task=TASK, device="moon"), None, CommandError),
    "Ctrl-C in the first run": (dict(task=TASK), interrupted, KeyboardInterrupt),
}


@pytest.mark.parametrize("why", FAILURES)
def test_no_folder_is_left_of_a_race_that_came_to_nothing(why: str, tmp_path: Path) -> None:
    options, on_measure, error = FAILURES[why]
    with pytest.raises(error):
        race(**options, optimizers=["SGD"], folder=tmp_path / "new" / "report").run(*filter(None, [on_measure]))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("why", FAILURES)
def test_a_folder_that_was_there_stays_as_it_was(why: str, tmp_path: Path) -> None:
    options, on_measure, error = FAILURES[why]
    empty, full = tmp_path / "empty", tmp_path / "full"
    empty.mkdir()
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    for folder in (empty, full, full / "new"):
        with pytest.raises(error):
            race(**options, optimizers=["SGD"], folder=folder).run(*filter(None, [on_measure]))
    assert list(empty.iterdir()) == []
    assert [path.name for path in full.iterdir()] == ["notes.txt"]


def test_what_was_finished_before_a_failure_is_kept(tmp_path: Path) -> None:
    def second(run: Run, step: int, loss: float | None) -> None:
        if run.contestant == "LAMB":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race(TASK, optimizers=["SGD", "LAMB"], rates={"": [0.1]}, folder=tmp_path / "report").run(second)
    assert len((tmp_path / "report" / RECORDS).read_text().splitlines()) == 1


def test_the_command_says_that_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("click", "rich", "matplotlib", "plotly"):
        pytest.importorskip(package)
    from thalweg.cli import run

    monkeypatch.setattr("thalweg.race.contest.execute", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(["race", "--steps", "1", "--out", str(tmp_path / "report")]) == 130
    assert "Stopped before the first run was finished: nothing is kept." in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--engine", "foreach"],
        ["--lr", "fast"],
        ["nosuchtask"],
        ["nosuchmodule:task"],
        ["fashion", "--data", "nowhere"],
        ["--nonsense"],
    ],
)
def test_a_command_that_fails_leaves_no_folder(arguments: list[str], tmp_path: Path) -> None:
    for package in ("click", "rich", "matplotlib", "plotly"):
        pytest.importorskip(package)
    from thalweg.cli import run

    assert run(["race", *arguments, "--out", str(tmp_path / "report")]) != 0
    assert list(tmp_path.iterdir()) == []


def test_a_task_whose_framework_is_missing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("click", "rich", "matplotlib", "plotly"):
        pytest.importorskip(package)
    from thalweg.cli import run

    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "thalweg.race.tasks.text", raising=False)
    assert run(["race", "text", "--out", str(tmp_path / "report")]) == 1
    assert list(tmp_path.iterdir()) == []
