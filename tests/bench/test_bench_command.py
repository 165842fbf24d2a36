"""``thalweg bench``: tables, files, errors in one sentence, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bench_cases import TINY

from thalweg.bench import bench, report
from thalweg.bench.quiet import Round
from thalweg.bench.record import Comparison, Heat, Row, Times
from thalweg.bench.rounds import Contest, Progress
from thalweg.errors import CommandError
from thalweg.show.arguments import Given
from thalweg.show.devices import Device, machine

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from thalweg import cli
from thalweg.bench import command as module

QUICK = ["tiny.json", "--front-ends", "numpy", "--against", "none", "--repeats", "2", "--no-memory", "--wait", "0"]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small model in a folder of its own."""
    monkeypatch.setattr(Device, "release_memory", lambda self: None)
    monkeypatch.setattr(module, "prepare_process", lambda device, threads: None)
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps({tensor.name: tensor.shape for tensor in TINY.tensors}))


@pytest.mark.nightly
def test_tables_and_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["somewhere/thalweg", "bench", "tiny"])
    assert cli.run(["bench", "--optimizers", "lamb,kron", *QUICK, "--out", "here"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("tiny")
    assert "thalweg.numpy LAMB" in said.out
    assert "thalweg.numpy Kron" in said.out
    surroundings = Path("here/bench.md").read_text().splitlines()[2]
    assert f"{machine()['cpu']}, " in surroundings
    assert f" cores, {machine()['architecture']}, " in surroundings
    assert surroundings in " ".join(said.out.split())
    assert "Written: here/bench.json, here/bench.md, here/bench.png, here/bench.svg" in said.err
    assert "\x1b" not in said.out + said.err
    record = json.loads(Path("here/bench.json").read_text())
    assert [row["rule"] for row in record["comparisons"][0]["rows"]] == ["LAMB", "Kron"]
    assert record["command"] == "thalweg bench tiny"
    assert "| thalweg.numpy LAMB |" in Path("here/bench.md").read_text()
    assert Path("here/bench.png").read_bytes().startswith(b"\x89PNG")
    assert "thalweg.numpy Kron" in Path("here/bench.svg").read_text()


@pytest.mark.nightly
def test_json_goes_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--optimizers", "sgd", "--json", *QUICK]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["comparisons"][0]["rows"][0]["contestant"] == "thalweg.numpy SGD"
    assert read["repeats"] == 2
    assert read["machine"]["architecture"] == machine()["architecture"]
    assert Path("report/bench/bench.md").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["small,gpt2"],
        ["--model", "small,gpt2"],
        ["--workload", "small,gpt2", "--optimizer", "lamb"],
        ["small,gpt2", "--rules", "LAMB"],
    ],
    ids=" ".join,
)
def test_other_names_of_arguments(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def measure(models: list[str], *, optimizers: list[str], **given: object) -> None:
        told = [given[name] for name in ("moving_grads", "options", "against")]
        asked.append((models, [name.lower() for name in optimizers], *told))
        raise CommandError("enough")

    monkeypatch.setattr(module, "bench", measure)
    usual = ["lamb", "lars", "adafactor"] if not {"--rules", "--optimizer"} & set(arguments) else ["lamb"]
    assert cli.run(["bench", *arguments]) == 1
    others = ["--gradients", "stay", "--option", "lamb.eps=1e-3", "--against", "kron-torch,timm"]
    assert cli.run(["bench", *arguments, *others]) == 1
    assert asked == [
        (["small", "gpt2"], usual, True, [], None),
        (["small", "gpt2"], usual, False, [Given("lamb", "eps", 1e-3)], ["kron_torch", "timm"]),
    ]


def test_ctrl_c_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = Contest.run
    counted = iter(range(3))

    def interrupt(*arguments: Any) -> None:
        if next(counted) == 1:
            raise KeyboardInterrupt
        run(*arguments)

    monkeypatch.setattr(Contest, "run", interrupt)
    assert cli.run(["bench", "tiny.json,tiny.json,gpt2", "--optimizers", "lamb", *QUICK[1:]]) == cli.INTERRUPTED
    said = capsys.readouterr()
    assert "Stopped: 1 of 3 models have results." in said.err
    assert "thalweg: stopped" in said.err
    record = json.loads(Path("report/bench/bench.json").read_text())
    assert record["stopped"]
    assert len(record["comparisons"]) == 1
    assert "Stopped before everything was measured." in Path("report/bench/bench.md").read_text()


def test_ctrl_c_before_anything_is_finished_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Contest, "run", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.run(["bench", *QUICK]) == cli.INTERRUPTED
    assert "Stopped: 0 of 1 models have results." in capsys.readouterr().err
    assert not Path("report").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--optimizers", "lambda"], 1, "there is no optimizer 'lambda': did you mean 'LAMB'?"),
        (["--option", "betas"], 1, "--option 'betas' must be NAME=VALUE"),
        (["--option", "lamb.betas=[2, 0.9]"], 1, "LAMB: betas"),
        (["gpt2", "--model", "resnet50"], 1, "are one and the same: write thalweg bench gpt2,resnet50"),
        (["--against", "torch,bitsandbytes"], 1, "there is no package 'bitsandbytes'"),
        (["--against", ""], 1, "package: nothing is left of ''"),
        (["--front-ends", "jax"], 1, "there is no front end 'jax'"),
        (["--budget", "plenty"], 1, "'plenty' is not a budget such as 80GB or 16GiB"),
        (["--model", ","], 1, "MODEL: nothing is left of ','"),
        (["--device", "tpu"], 2, "'tpu' is not one of 'cpu', 'cuda'"),
        (["--repeats", "0"], 2, "0 is not in the range x>=1"),
        (["gpt2", "resnet50"], 2, "unexpected extra argument (resnet50)"),
    ],
)
def test_mistakes_are_told_in_one_sentence(
    arguments: list[str], code: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", *arguments]) == code
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.startswith("thalweg: ")
    assert len(said.err.strip().splitlines()) == 1
    assert said.out == ""


def test_a_folder_that_cannot_be_written_is_found_out_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").write_text("a file")
    monkeypatch.setattr(Contest, "run_heat", lambda *_: pytest.fail("something was measured"))
    assert cli.run(["bench", *QUICK, "--out", "taken/folder"]) == 1
    assert capsys.readouterr().err == "thalweg: taken/folder: Not a directory\n"


def test_an_earlier_record_is_kept_where_nobody_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--optimizers", "lamb", *QUICK]) == 0
    record = Path("report/bench/bench.json").read_bytes()
    assert cli.run(["bench", "--optimizers", "lamb", "--engine", "foreach", *QUICK]) == 1
    assert "no contestant could run: thalweg.numpy LAMB (OptionError: engine must be" in capsys.readouterr().err
    assert Path("report/bench/bench.json").read_bytes() == record


def test_a_narrow_terminal_has_the_columns_that_matter_most() -> None:
    row = {"contestant": "pytorch_optimizer Lamb(foreach=False)", "engine": "", "ms": "111.2"}
    row |= {"quartiles": "107.3 to 111.7", "ratio": "4.35", "bytes a parameter": "40", "share of the floor": "17%"}
    row |= {"extra memory": "9.34 MB", "of the parameters": "9.1%"}
    columns = {title: [cell] for title, cell in row.items()}
    assert list(report.fit_columns(columns, 200)) == list(row)
    assert list(report.fit_columns(columns, 125)) == list(row), "titles are broken into words"
    assert list(report.fit_columns(columns, 80)) == ["contestant", "ms", "ratio", "share of the floor", "extra memory"]
    assert list(report.fit_columns(columns, 10)) == ["contestant", "ms", "ratio"]
    for width in range(60, 200):
        assert report.total_width(report.fit_columns(columns, width)) <= width


def test_in_a_terminal_a_bar_moves_and_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    screen = io.StringIO()
    with report.show_progress(Console(file=screen, force_terminal=True, width=120), 2) as bar:
        bar(Progress(model="tiny", doing="warming up one", done=0.5))
        with bar.step_aside():
            screen.write("A TABLE\n")
        bar(Progress(model="larger", doing="1 of 7 rounds", done=0.1))
    shown = screen.getvalue()
    assert "tiny" in shown
    assert "larger" in shown
    assert "1 of 7 rounds" in shown
    assert "A TABLE" in shown


@pytest.mark.parametrize("gpu", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_long_names_and_long_bars_fit_into_the_picture(gpu: bool, tmp_path: Path) -> None:
    """matplotlib warns where they do not, and warnings are errors here."""
    from thalweg.bench.draw import draw

    names = ["thalweg.torch LAMB(trust=False)", "pytorch_optimizer LARS(foreach=False)"]
    seconds = dict(zip(names, (1e-3, 9.0), strict=True))
    host = dict(zip(names, (1.0, 2e-3), strict=True)) if gpu else {}
    rows = [
        Row(contestant=name, package=package, front_end="torch", rule="LAMB", floor=10**9, reference=names[0])
        for name, package in zip(names, ("thalweg", "pytorch_optimizer"), strict=True)
    ]
    comparison = Comparison(
        model="a model with quite a long name",
        about="",
        parameters=123_456_789,
        tensors=1234,
        itemsize=4,
        rows=rows,
    )
    comparison.add(Heat([Round(Times(seconds, [4e10], host), 0.9)]))
    found = bench(TINY, optimizers=[], front_ends=["numpy"], against=[])
    found.comparisons = [comparison]
    draw(found, tmp_path)
    drawn = (tmp_path / "bench.svg").read_text()
    assert "(disturbed)" in drawn
    assert ("circles and ratios: the host" in drawn) == gpu


@pytest.mark.nightly
def test_pictures_are_the_same_file_twice_and_none_of_nothing(tmp_path: Path) -> None:
    from thalweg.bench.draw import draw

    found = bench(TINY, optimizers=["lamb"], front_ends=["numpy"], against=[], repeats=2, memory=False, wait=0.0)
    first, second = ([path.read_bytes() for path in draw(found, tmp_path / name)] for name in ("one", "two"))
    assert first == second
    found.comparisons.clear()
    assert draw(found, tmp_path) == []
