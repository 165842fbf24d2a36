"""``thalweg race``: the table, the report, exit codes, and words for whoever mistyped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from thalweg.cli import run
from thalweg.race import contest
from thalweg.race.run import execute

QUICK = ["race", "--steps=3", "--seeds=1", "--optimizers=sgd,lamb", "--option=lr=0.02", "--option=sgd.lr=0.1,0.2"]


def test_a_table_and_a_report_of_a_task_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    asked = ["--optimizers", "sgd,lamb", "--against", "torch.optim.SGD", "--against", "torch.optim:Adamax"]
    for option in ("lr=0.1", "torch.optim.adamax.lr=0.5", "torch.optim.SGD.momentum=0.5", "lamb.betas=[0.9, 0.95]"):
        asked += ["--option", option]
    assert run(["race", "race_tasks:brackets", *asked]) == 0
    printed = capsys.readouterr()
    for words in ("Brackets [/red] 漢: 5 steps", "loss [$] of $_{", "state", "LAMB(betas=(0.9, 0.95))"):
        assert words in printed.out
    assert "\ntorch.optim.SGD(momentum=0.5)" in printed.out
    assert "torch.optim.Adamax  0.5" in printed.out
    assert "\x1b" not in printed.out + printed.err
    folder = Path("report/race_tasks.brackets")
    assert {path.name for path in folder.iterdir()} == {"runs.jsonl", "index.html"}


def test_the_same_command_goes_on_after_ctrl_c_runs_nothing_twice_and_skips_what_is_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("long" * 30)
    path = folder / "runs.jsonl"
    left: list[None] = []

    def execute_until_ctrl_c(*asked: Any) -> Any:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return execute(*asked)

    def ran(code: int, *options: str) -> tuple[str, str]:
        assert run([*QUICK, "--out", str(folder), *options]) == code
        told = capsys.readouterr()
        assert told.err.count("\n") == (3 if code else 1), "remarks are not broken into lines where nobody watches"
        return told

    with monkeypatch.context() as patched:
        patched.setattr(contest, "execute", execute_until_ctrl_c)
        assert "Stopped before the first run was finished: nothing is kept." in ran(130)[1]
        assert not folder.exists()
        left += [None, None]
        assert "Stopped. 2 of 3 runs are kept in" in ran(130)[1]
    kept = path.read_bytes()
    assert "2 of 3 runs are recorded in" in ran(0)[1]
    records = path.read_bytes()
    assert (records.startswith(kept), len(records.splitlines())) == (True, 3)
    path.write_bytes(b"damaged")
    printed, told = ran(0, "--json")
    assert "that are no records, and skipped: 1." in told
    tried = {result["contestant"]: result["sweep"]["lr"] for result in json.loads(printed)["results"]}
    assert tried == {"SGD": [0.1, 0.2], "LAMB": [0.02]}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ("--steps 0", 2, "0 is not in the range x>=1"),
        ("--optimizers ,", 1, "--optimizers: nothing is left of ','"),
        ("--option lamb.epsilon=1", 1, "LAMB has no option 'epsilon': here it is eps"),
        ("--device tpu", 1, "task 'digits': it is plain numpy and runs only on the cpu, not on 'tpu'"),
        ("--out file", 2, "file"),
        ("--out file/folder", 1, "file"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_no_folder(
    arguments: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert run([*QUICK, *arguments.split()]) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.startswith("thalweg: ")
    assert (told.err.count("\n"), told.out) == (1, "")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_a_missing_extra_is_named_before_the_race_begins(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules['plotly'] = None; sys.argv = ['thalweg', 'race', '--out', {str(tmp_path)!r}];"
        "from thalweg.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, 'thalweg: plotly is not installed: pip install "thalweg[cli]"\n')
    assert list(tmp_path.iterdir()) == []
