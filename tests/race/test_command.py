"""``thalweg race``: tables, files, exit codes, and words for whoever mistyped."""

from __future__ import annotations

import html
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from thalweg.show.palette import RIVALS

from thalweg.cli import run
from thalweg.rules import RULES

QUICK = ["--optimizers", "sgd,lamb", "--lr", "0.02", "--lr", "sgd=0.1,0.2", "--steps", "3", "--seeds", "2"]

drawn = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("matplotlib", "plotly")),
    reason="what draws is not installed",
)


@pytest.fixture(scope="module")
def raced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a race that is over: to be copied."""
    folder = tmp_path_factory.mktemp("raced")
    assert run(["race", *QUICK, "--out", str(folder)]) == 0
    return folder


OWN = """
import numpy as np
from thalweg.race import ArrayTask

task = ArrayTask(
    name="own",
    title="Brackets [/red] 漢",
    loss_name="loss [$] of $_{",
    init=lambda seed: {"x": np.ones(3)},
    gradients=lambda params, batch: {"x": params["x"]},
    evaluate=lambda params: ((params["x"] ** 2).sum() - 2, 27.5),
    steps=3,
)
"""


@pytest.mark.slow
@drawn
def test_tables_pictures_and_a_page_of_a_task_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With any name, any score and losses below zero."""
    (tmp_path / "own_task_command.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert run(["race", "own_task_command:task", "--optimizers", "sgd,lamb", "--lr", "sgd,lamb=0.1"]) == 0
    printed = capsys.readouterr()
    for word in ("Brackets [/red] 漢: 3 steps", "loss [$] of $_{", "score", "27.5", "LAMB", "SGD", "state", "0.1"):
        assert word in printed.out
    assert "2750" not in printed.out
    assert "\x1b" not in printed.out + printed.err
    folder = Path("report/own_task_command.task")
    names = {"runs.jsonl", "race.json", "index.html", "race.png", "race.svg", "sweep.png", "sweep.svg"}
    assert {path.name for path in folder.iterdir()} == names
    assert (folder / "race.png").read_bytes().startswith(b"\x89PNG")
    picture = (folder / "race.svg").read_text(encoding="utf-8")
    assert "27.5" in picture
    assert "10^" not in picture, "the axis is not logarithmic"


@pytest.mark.nightly
@drawn
def test_the_same_command_runs_nothing_twice_and_redraw_runs_nothing(
    tmp_path: Path, raced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / ("long" * 30)
    out = ["--out", str(folder)]
    shutil.copytree(raced, folder)
    records = (folder / "runs.jsonl").read_bytes()
    picture = (folder / "race.svg").read_bytes()
    capsys.readouterr()
    assert run(["race", *QUICK, *out]) == 0
    told = capsys.readouterr().err
    assert "6 of 6 runs are recorded" in told
    assert told.count("\n") == 1, "remarks are not broken into lines where nobody watches"
    (folder / "race.svg").unlink()
    assert run(["race", "--redraw", *out]) == 0
    assert (folder / "runs.jsonl").read_bytes() == records
    assert (folder / "race.svg").read_bytes() == picture
    assert run(["race", *QUICK, "--more-lr", "lamb=0.03", "--full", *out]) == 0
    assert (folder / "runs.jsonl").read_bytes().startswith(records)
    assert len((folder / "runs.jsonl").read_bytes().splitlines()) == 6 + 2


@pytest.mark.nightly
@drawn
def test_a_damaged_record_is_reported_and_redone(
    tmp_path: Path, raced: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path)]
    shutil.copytree(raced, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "runs.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    capsys.readouterr()
    assert run(["race", "--redraw", *out]) == 0
    told = capsys.readouterr()
    assert "line 6, is damaged and left out" in told.err
    assert "1 run is missing" in told.out
    assert run(["race", *QUICK, "--json", *out]) == 0
    told = capsys.readouterr()
    assert "line 6, is damaged and done again" in told.err
    assert path.read_bytes().splitlines()[:5] == whole.splitlines()[:5]
    summary = json.loads(told.out)
    assert summary["missing"] == 0
    tried = {result["contestant"]: result["sweep"]["lr"] for result in summary["courses"][0]["results"]}
    assert tried == {"SGD": [0.1, 0.2], "LAMB": [0.02]}


@pytest.mark.nightly
@drawn
def test_batch_sizes_and_valleys_have_pictures_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches = ["--batch", "32,64,2048", "--optimizers", "lamb", "--lr", "0.02", "--steps", "4", "--seeds", "1"]
    assert run(["race", *batches, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "batches of 32: 8 steps" in printed
    assert "batches of 2,048: 1 step," in printed
    assert (tmp_path / "batches.svg").exists()
    valley = ["valley", "--optimizers", "kron,sgd", "--lr", "0.01", "--lr", "sgd=1e-3,1e9", "--steps", "5"]
    assert run(["race", *valley, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "valley.png").stat().st_size > 50_000


@pytest.mark.nightly
@drawn
def test_rivals_and_options_are_in_table_pictures_and_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("torch", "ml_dtypes"):
        pytest.importorskip(package)
    quick = ["--optimizers", "sgd,lamb", "--lr", "0.02", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    asked = ["--against", "torch.optim.Adam,torch.optim.SGD", "--against", "torch.optim:Adamax"]
    options = ["adam.lr=0.01", "torch.optim.SGD.momentum=0.5", "lamb.betas=[0.9, 0.95]", "momentum_dtype=bf16"]
    given = [word for option in options for word in ("--option", option)]
    assert run(["race", *quick, *asked, *given, "--lr", "Adamax=0.5"]) == 0
    printed = capsys.readouterr().out
    ours = "betas=(0.9, 0.95), momentum_dtype='bfloat16'"
    theirs = ("Adam: torch.optim.Adam()", "\ntorch.optim.SGD(momentum=0.5)", "Adamax: torch.optim.Adamax()")
    for words in (f"LAMB: {ours}", "SGD: momentum_dtype='bfloat16'", *theirs):
        assert words in printed
    picture = (tmp_path / "race.svg").read_text(encoding="utf-8")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert ours in html.unescape(page)
    for name, colour, lr in zip(("Adam", "torch.optim.SGD", "Adamax"), RIVALS, (0.01, 0.02, 0.5), strict=False):
        assert f"{name}  lr {lr:g}" in picture
        assert colour in picture
        assert f'data-contestant="{name}"' in page
        assert f'"{colour}"' in page
    (tmp_path / "race.svg").unlink()
    without = "import sys; sys.modules['torch'] = None\nfrom thalweg.cli import run\n"
    redraw = f"{without}sys.exit(run(['race', '--redraw', '--out', {str(tmp_path)!r}]))"
    subprocess.run([sys.executable, "-c", redraw], check=True, capture_output=True)  # a redraw needs no rival
    assert (tmp_path / "race.svg").read_text(encoding="utf-8") == picture


@drawn
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--steps", "0"], 2, "0 is not in the range x>=1"),
        (["--nonsense"], 2, "nonsense"),
        (["--lr", "fast"], 1, "--lr must be a list of positive numbers, such as 0.01,0.1, got 'fast'"),
        (["--lr", "0"], 1, "--lr must be a list of positive numbers"),
        (["--more-lr", "lamb=-1"], 1, "--more-lr must be a list of positive numbers, such as 0.01,0.1, got '-1'"),
        (
            ["--optimizers", "lamb", "--lr", "kron=0.1"],
            1,
            "the option kron.lr is for Kron, which is not among the optimizers: LAMB",
        ),
        (["--lr", "krn=0.1"], 1, "there is no optimizer 'krn': did you mean 'Kron'?"),
        (["--optimizers", "adamm"], 1, "there is no optimizer 'adamm': did you mean 'AdamW'?"),
        (["--batch-size", "big"], 1, "batch sizes must be whole numbers from 1 on"),
        (["--batch-size", ","], 1, "nothing is left of ','"),
        (["--engine", "warp"], 2, "'warp' is not one of 'auto', 'reference', 'foreach', 'fused'"),
        (["--engine", "foreach"], 1, "task 'digits', SGD: engine must be one of 'auto', 'reference', 'fused'"),
        (["--lr", "=0.1"], 1, "nothing is left of ''"),
        (["--option", "lamb.=3"], 1, "--option 'lamb.=3' must be NAME=VALUE"),
        (["--option", "lamb.epsilon=1"], 1, "LAMB has no option 'epsilon': here it is eps"),
        (["--against", ","], 1, "--against: nothing is left of ','"),
        (["--against", "Adam"], 1, "'Adam' is not an import name"),
        (["nosuchmodule:task"], 1, "there is no module 'nosuchmodule'"),
        (["fashion", "--data", "nowhere"], 1, "is not a folder"),
        (["valley", "--batch", "3"], 1, "has no batches: leave out --batch"),
        (["digit"], 1, "did you mean 'digits'?"),
        (["--redraw"], 1, "has no recorded race to draw"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_no_folder(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "fashion" in arguments:
        pytest.importorskip("torch.nn")
    assert run(["race", *arguments, "--out", str(tmp_path / "new")]) == code
    told = capsys.readouterr()
    assert words in told.err
    assert told.err.startswith("thalweg: ")
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert list(tmp_path.iterdir()) == []


@drawn
def test_a_task_whose_framework_is_missing_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "thalweg.race.tasks.text", raising=False)
    assert run(["race", "text", "--out", str(tmp_path / "report")]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out, code in (("file", 2), ("file/folder", 1)):
        assert run(["race", *QUICK, "--out", str(tmp_path / out)]) == code
        assert capsys.readouterr().err.count("\n") == 1


@drawn
def test_ctrl_c_in_the_first_run_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("thalweg.race.contest.execute", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run(["race", "--steps", "1", "--out", str(tmp_path / "report")]) == 130
    assert "Stopped before the first run was finished: nothing is kept." in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


@drawn
@pytest.mark.nightly
def test_ctrl_c_keeps_what_was_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    # whoever runs the tests in the background may have had the signal ignored, and children inherit that
    listening = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    program = f"{listening} from thalweg.__main__ import main; main()"
    arguments = [sys.executable, "-c", program, "race", "--seeds", "1", "--out", str(tmp_path)]
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    records = tmp_path / "runs.jsonl"
    deadline = time.monotonic() + 600
    while not (records.exists() and records.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=600)
    kept = records.read_bytes()
    assert process.returncode == 130
    count = len(kept.splitlines())
    assert f"{count} of {5 * len(RULES)} runs are kept" in told.replace("\n", " ")
    assert "Traceback" not in told
    few = [*arguments, "--optimizers", "sgd", "--lr", "sgd=0.3"]  # the first that is tried
    again = subprocess.run(few, capture_output=True, text=True, check=True)
    assert "1 of 1 runs are recorded" in again.stderr
    assert records.read_bytes() == kept


@pytest.mark.parametrize("package", ["matplotlib", "plotly"])
def test_without_what_draws_a_race_is_recorded_and_says_how_to_draw_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert run(["race", *QUICK, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert {path.name for path in tmp_path.iterdir()} == {"runs.jsonl", "race.json"}
    assert "it ended with a training loss of" in printed.out
    assert package in printed.err
    assert f"{package} is not installed: after pip install" in printed.out.replace("\n", " ")
    assert f"`thalweg race --redraw --out {tmp_path}` draws it" in printed.out
    assert run(["race", "--redraw", "--out", str(tmp_path)]) == 1
    assert f'{package} is not installed: pip install "thalweg[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize("package", ["click", "rich"])
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
