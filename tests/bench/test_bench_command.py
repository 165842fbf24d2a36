"""``thalweg bench``: tables, files, errors in one sentence, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_cases import TINY

from thalweg.bench import bandwidth, bench, rounds, run
from thalweg.bench.devices import Cpu
from thalweg.bench.quiet import Round
from thalweg.bench.record import Comparison, Entrant, Heat, Times
from thalweg.show.surroundings import machine

pytest.importorskip("click")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import click.testing

from thalweg import cli
from thalweg.bench import command as module

QUICK = ["--front-ends", "numpy", "--against", "none", "--repeats", "2", "--no-memory", "--wait", "0"]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small model under the name of a large one, in a folder of its own."""
    monkeypatch.setattr(bandwidth, "SIZE", 2**16)
    monkeypatch.setattr(Cpu, "rest", 0.0)
    monkeypatch.setattr(Cpu, "give_back", lambda self: None)
    monkeypatch.setattr(run, "resolve", lambda name, dtype: TINY)
    monkeypatch.setattr(module.process, "prepare", lambda device, threads: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_tables_and_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--rules", "lamb,kron", *QUICK, "--out", "here"]) == 0
    said = capsys.readouterr()
    assert "LAMB, tiny" in said.out
    assert "Kron, tiny" in said.out
    assert "thalweg.numpy LAMB" in said.out
    assert "share of the floor" in said.out
    surroundings = Path("here/bench.md").read_text().splitlines()[2]
    assert f"{machine()['cpu']}, " in surroundings
    assert f" cores, {machine()['architecture']}, " in surroundings
    assert surroundings in " ".join(said.out.split())
    assert "Written: here/bench.json, here/bench.md, here/bench.png, here/bench.svg" in said.err
    assert "\x1b" not in said.out + said.err
    record = json.loads(Path("here/bench.json").read_text())
    assert [comparison["rule"] for comparison in record["comparisons"]] == ["lamb", "kron"]
    assert record["command"] == (
        "thalweg bench --rules lamb,kron --against none --front-ends numpy --repeats 2 --no-memory --wait 0.0"
    )
    assert "| thalweg.numpy LAMB |" in Path("here/bench.md").read_text()
    assert Path("here/bench.png").read_bytes().startswith(b"\x89PNG")
    assert "thalweg.numpy Kron" in Path("here/bench.svg").read_text()


def test_json_goes_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--rules", "sgd", "--json", *QUICK]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["comparisons"][0]["rows"][0]["contestant"] == "thalweg.numpy SGD"
    assert read["repeats"] == 2
    assert read["machine"]["architecture"] == machine()["architecture"]
    assert Path("report/bench/bench.md").exists()


def test_ctrl_c_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    compare = run.compare

    def interrupted(workload: object, rule: str, *arguments: object) -> Comparison:
        if rule == "lars":
            raise KeyboardInterrupt
        return compare(workload, rule, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "compare", interrupted)
    assert cli.run(["bench", "--rules", "lamb,lars,sgd", *QUICK]) == cli.INTERRUPTED
    said = capsys.readouterr()
    assert "1 of 3 comparisons are finished." in said.err
    assert "thalweg: stopped" in said.err
    record = json.loads(Path("report/bench/bench.json").read_text())
    assert record["stopped"]
    assert [comparison["rule"] for comparison in record["comparisons"]] == ["lamb"]
    assert "Stopped before all was measured." in Path("report/bench/bench.md").read_text()


def test_ctrl_c_before_anything_is_finished_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "compare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert cli.run(["bench", *QUICK]) == cli.INTERRUPTED
    assert "0 of 3 comparisons are finished." in capsys.readouterr().err
    assert not Path("report").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--rules", "lambda"], 1, "there is no rule 'lambda': did you mean 'lamb'?"),
        (["--against", "torch,bitsandbytes"], 1, "there is no package 'bitsandbytes'"),
        (["--against", ""], 1, "package: nothing is left of ''"),
        (["--front-ends", "jax"], 1, "there is no front end 'jax'"),
        (["--budget", "plenty"], 1, "'plenty' is not a budget such as 80GB or 16GiB"),
        (["--model", ","], 1, "--model: nothing is left of ','"),
        (["--device", "tpu"], 2, "'tpu' is not one of 'cpu', 'cuda'"),
        (["--repeats", "0"], 2, "0 is not in the range x>=1"),
        (["gpt2"], 2, "unexpected extra argument (gpt2)"),
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


def test_no_gpu_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.run(["bench", "--device", "cuda"]) == 1
    assert capsys.readouterr().err == (
        "thalweg: there is no GPU here that PyTorch can use: --device cpu is what can be measured\n"
    )


def test_help_teaches_by_examples() -> None:
    shown = click.testing.CliRunner().invoke(module.command, ["--help"]).output
    assert "thalweg bench --device cuda --model gpt2,bert-large" in shown
    for option in ("--model", "--rules", "--device", "--against", "--front-ends", "--inner", "--budget", "--out"):
        assert option in shown


def test_lists_are_completed_word_by_word() -> None:
    complete = module.completing(["lamb", "lars", "kron"])
    assert [item.value for item in complete(None, None, "la")] == ["lamb", "lars"]
    assert [item.value for item in complete(None, None, "lamb,")] == ["lamb,lars", "lamb,kron"]
    assert [item.value for item in complete(None, None, "lamb,k")] == ["lamb,kron"]


def test_models_are_completed_by_name_or_by_file() -> None:
    assert [item.value for item in module.complete_model(None, None, "res")] == ["resnet50"]
    assert [item.type for item in module.complete_model(None, None, "weights/")] == ["file"]


def test_a_folder_that_cannot_be_written_is_found_out_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("taken").write_text("a file")
    monkeypatch.setattr(rounds, "run_heat", lambda *_: pytest.fail("something was measured"))
    assert cli.run(["bench", *QUICK, "--out", "taken/folder"]) == 1
    assert capsys.readouterr().err == "thalweg: taken/folder: Not a directory\n"


def test_nobody_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--rules", "lamb", "--engine", "foreach", *QUICK]) == 1
    assert "thalweg: nobody could run: thalweg.numpy LAMB (OptionError: engine must be" in capsys.readouterr().err


def test_an_earlier_record_is_kept_where_nobody_could_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "--rules", "lamb", *QUICK]) == 0
    record = Path("report/bench/bench.json").read_bytes()
    assert cli.run(["bench", "--rules", "lamb", "--engine", "foreach", *QUICK]) == 1
    assert Path("report/bench/bench.json").read_bytes() == record


def test_a_narrow_terminal_has_the_columns_that_matter_most() -> None:
    from thalweg.bench.terminal import fitting, total
    from thalweg.bench.words import columns

    row = [
        "pytorch_optimizer Lamb(foreach=False)",
        "",
        "111.2",
        "107.3 to 111.7",
        "4.35",
        "9.2",
        "17%",
        "9.34 MB",
        "9.1%",
    ]
    titles = columns(memory=True)
    assert list(fitting(titles, [row], 200)) == titles
    assert list(fitting(titles, [row], 120)) == titles, "titles are broken into words"
    assert list(fitting(titles, [row], 80)) == ["contestant", "ms", "ratio", "share of the floor", "extra memory"]
    assert list(fitting(titles, [row], 10)) == ["contestant", "ms", "ratio"]
    for width in range(60, 200):
        assert total(fitting(titles, [row], width)) <= width


def test_packages_by_either_spelling() -> None:
    assert module.packages("kron-torch,timm") == ["kron_torch", "timm"]
    assert module.packages("none") == []
    assert module.packages(None) is None


def test_in_a_terminal_a_bar_moves_and_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    from rich.console import Console

    from thalweg.bench.rounds import Progress
    from thalweg.bench.terminal import progress_bar

    screen = io.StringIO()
    with progress_bar(Console(file=screen, force_terminal=True, width=120), 2) as bar:
        bar(Progress(model="tiny", rule="lamb", doing="warming up one", done=0.5))
        with bar.aside():
            screen.write("A TABLE\n")
        bar(Progress(model="tiny", rule="lars", doing="1 of 7 rounds", done=0.1))
    shown = screen.getvalue()
    assert "LAMB, tiny" in shown
    assert "LARS, tiny" in shown
    assert "1 of 7 rounds" in shown
    assert "A TABLE" in shown


def test_long_names_and_long_bars_fit_into_the_picture(tmp_path: Path) -> None:
    """matplotlib warns where they do not, and warnings are errors here."""
    from thalweg.bench.draw import draw

    names = ["thalweg.torch LAMB(trust=False)", "pytorch_optimizer LARS(foreach=False)"]
    seconds = dict(zip(names, (1e-3, 9.0), strict=True))
    entrants = {
        name: Entrant(package=package, front_end="torch", rule="lamb", floor=10**9)
        for name, package in zip(names, ("thalweg", "pytorch_optimizer"), strict=True)
    }
    comparison = Comparison(
        model="a model with quite a long name",
        about="",
        parameters=123_456_789,
        tensors=1234,
        rule="lamb",
        itemsize=4,
        floor=10**9,
        yardstick="",
        heats=[Heat([Round(Times(seconds, [4e10]), 0.9)])],
        entrants=entrants,
    )
    found = bench(TINY, rules=[], front_ends=["numpy"], against=[])
    found.comparisons = [comparison]
    draw(found, tmp_path)
    assert "(disturbed)" in (tmp_path / "bench.svg").read_text()


def test_pictures_are_the_same_file_twice_and_none_of_nothing(tmp_path: Path) -> None:
    from thalweg.bench.draw import draw

    found = bench(TINY, rules=["lamb"], front_ends=["numpy"], against=[], repeats=2, memory=False, wait=0.0)
    first, second = ([path.read_bytes() for path in draw(found, tmp_path / name)] for name in ("one", "two"))
    assert first == second
    found.comparisons.clear()
    assert draw(found, tmp_path) == []
