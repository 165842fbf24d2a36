"""``thalweg race``: the table, the report, exit codes, and words for whoever mistyped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

for package in ("click", "rich", "plotly"):
    pytest.importorskip(package)

from thalweg.cli import run

QUICK = [
    "--optimizers",
    "sgd,lamb",
    "--option",
    "lr=0.02",
    "--option",
    "sgd.lr=0.1,0.2",
    "--steps",
    "3",
    "--seeds",
    "2",
]
OWN = """
from race_tasks import parabola

task = parabola(title="Brackets [/red] 漢", loss_name="loss [$] of $_{")
"""


def test_a_table_and_a_report_of_a_task_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "own_task_command.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    asked = ["--optimizers", "sgd,lamb", "--against", "torch.optim.SGD", "--against", "torch.optim:Adamax"]
    for option in ("lr=0.1", "torch.optim.adamax.lr=0.5", "torch.optim.SGD.momentum=0.5", "lamb.betas=[0.9, 0.95]"):
        asked += ["--option", option]
    assert run(["race", "own_task_command:task", *asked]) == 0
    printed = capsys.readouterr()
    for words in (
        *("Brackets [/red] 漢: 5 steps", "loss [$] of $_{", "state", "LAMB(betas=(0.9, 0.95))", "SGD(momentum=0.9)"),
        *("\ntorch.optim.SGD(momentum=0.5)", "torch.optim.Adamax  0.5"),
    ):
        assert words in printed.out
    assert "\x1b" not in printed.out + printed.err
    folder = Path("report/own_task_command.task")
    assert {path.name for path in folder.iterdir()} == {"runs.jsonl", "index.html"}


def test_the_same_command_runs_nothing_twice_and_a_damaged_record_is_done_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / ("long" * 30))]
    assert run(["race", *QUICK, *out]) == 0
    path = tmp_path / ("long" * 30) / "runs.jsonl"
    records = path.read_bytes()
    capsys.readouterr()
    assert run(["race", *QUICK, *out]) == 0
    told = capsys.readouterr().err
    assert "6 of 6 runs are recorded" in told
    assert told.count("\n") == 1, "remarks are not broken into lines where nobody watches"
    assert path.read_bytes() == records
    path.write_bytes(records[:-30])
    assert run(["race", *QUICK, "--json", *out]) == 0
    told = capsys.readouterr()
    assert "that are no records, and skipped: 1." in told.err
    tried = {result["contestant"]: result["sweep"]["lr"] for result in json.loads(told.out)["results"]}
    assert tried == {"SGD": [0.1, 0.2], "LAMB": [0.02]}
    assert len(path.read_bytes().splitlines()) == 7


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--steps", "0"], 2, "0 is not in the range x>=1"),
        (["--nonsense"], 2, "nonsense"),
        (["--optimizers", ","], 1, "--optimizers: nothing is left of ','"),
        (["--option", "lamb.=3"], 1, "--option 'lamb.=3' must be NAME=VALUE"),
        (["--option", "lamb.epsilon=1"], 1, "LAMB has no option 'epsilon': here it is eps"),
        (["--option", "engine=foreach"], 1, "task 'digits', SGD: engine must be one of 'auto', 'reference', 'fused'"),
        (["--device", "tpu"], 1, "task 'digits': it is plain numpy and runs only on the cpu, not on 'tpu'"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_no_folder(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["race", *arguments, "--out", str(tmp_path / "new")]) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.startswith("thalweg: ")
    assert (told.err.count("\n"), told.out) == (1, "")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, code in (("file", 2), ("file/folder", 1)):
        assert run(["race", *QUICK, "--out", str(tmp_path / out)]) == code
        assert capsys.readouterr().err.count("\n") == 1


def test_ctrl_c_in_the_first_run_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thalweg.race.contest.execute", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(["race", "--optimizers", "sgd", "--steps", "1", "--out", str(tmp_path / "report")]) == 130
    assert "Stopped before the first run was finished: nothing is kept." in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # whoever runs the tests in the background may have had the signal ignored, and children inherit that
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    program = f"{listening} from thalweg.__main__ import main; main()"
    arguments = [sys.executable, "-c", program, "race", "--optimizers", "sgd", "--out", str(tmp_path)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    records = tmp_path / "runs.jsonl"
    deadline = time.monotonic() + 600
    while not (records.exists() and records.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    kept = records.read_bytes()
    assert process.returncode == 130
    assert f"{len(kept.splitlines())} of " in told.replace("\n", " ")
    assert "Traceback" not in told
    again = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert f"{len(kept.splitlines())} of " in again.stderr
    assert records.read_bytes().startswith(kept)


@pytest.mark.parametrize("package", ["click", "rich", "plotly"])
def test_a_missing_extra_is_named_before_the_race_begins(package: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['thalweg', 'race', '--out', {str(tmp_path)!r}];"
        "from thalweg.__main__ import main; main()"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f'{package} is not installed: pip install "thalweg[cli]"' in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not (tmp_path / "runs.jsonl").exists()
