"""The suite of training runs: how rates are searched and chosen, that runs resume, and what the tables say."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks.training import contestants, corpus, draw, protocol, run
    from benchmarks.training.tasks import Task
finally:
    sys.path.remove(str(ROOT))

RECORDS = ROOT / "benchmarks/training/results"


def ran(who: str, lr: float, seed: int, score: float | None, **told: Any) -> protocol.Run:
    """A run of two scores, 60 and its last."""
    head = {"contestant": who, "lr": lr, "seed": seed, "validation": score, "test": score, "ms": 10.0}
    rest = {"state_bytes": 800, "curve": [[1, 60.0], [2, score]], "alone": True, "settings": {}}
    return {**head, **rest, **told}


def record(*runs: protocol.Run) -> dict[str, Any]:
    told = {"task": "fashion-512", "about": "percent", "parameters": 100, "steps": 2, "batch_size": 512}
    return {**told, "device": "cpu", "torch": "2", "data": "x", "higher_is_better": True, "runs": list(runs)}


# ---- the search


def test_rates_go_beyond_an_edge_and_else_between() -> None:
    tried: dict[float, float] = {}
    losses = {0.01: 3.0, 0.03: 2.0, 0.0033: 4.0, 0.09: 2.5, 0.052: 1.0}
    for rate, loss in losses.items():
        assert protocol.next_rate(tried, 0.01) == rate
        tried[rate] = loss
    assert protocol.next_rate({0.01: math.inf, 0.03: math.inf, 0.0033: math.inf}, 0.01) == 0.0011


def test_the_rate_is_the_one_of_the_better_mean_once_both_have_run_all_seeds() -> None:
    """As LARS at batches of 2048: best on two seeds at a rate at which the third fell."""
    search = [ran("LARS", 1.0, 0, 90.2), ran("LARS", 3.0, 0, 91.5), ran("LARS", 9.0, 0, 92.2)]
    leader = [ran("LARS", 9.0, 1, 92.6), ran("LARS", 9.0, 2, 81.5)]
    assert protocol.finalists(search, True) == [9.0, 3.0]
    assert protocol.chosen(search + leader, True) == protocol.Choice(9.0, 1)
    runner_up = [ran("LARS", 3.0, 1, 91.3), ran("LARS", 3.0, 2, 91.4)]
    assert protocol.chosen(search + leader + runner_up, True) == protocol.Choice(3.0, 3)
    diverged = [ran("LARS", 9.0, 1, None), ran("LARS", 3.0, 1, 20.0)]
    assert protocol.chosen(search + diverged, True) == protocol.Choice(3.0, 2)


def test_scores_and_steps_between_points_of_a_curve() -> None:
    curve = [(10, 4.0), (20, 2.0)]
    assert [protocol.score_at(curve, step) for step in (5, 10, 15, 30)] == [None, 4.0, 3.0, 2.0]
    assert [protocol.steps_to(curve, wanted, False) for wanted in (5.0, 3.0, 1.0)] == [10.0, 15.0, None]


def test_an_option_that_came_later_does_not_begin_a_search_anew_and_a_changed_one_does() -> None:
    then = {"0": {"betas": [0.9, 0.999], "eps": 1e-6}}
    assert protocol.alike(then, {"0": {**then["0"], "keep_norms": False}})
    assert not protocol.alike(then, {"0": {**then["0"], "eps": 1e-8}})
    assert not protocol.alike(then, {**then, "1": then["0"]})


# ---- the tables


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]


def test_a_table_tells_of_seeds_that_diverged_and_of_times_that_do_not_count() -> None:
    base = [ran(draw.BASELINE, 0.1, seed, score) for seed, score in enumerate((80.0, 90.0))]
    slow = [ran("Slow", 0.1, seed, score, ms=20.0) for seed, score in enumerate((90.0, None))]
    shared = [ran("Shared", 0.1, 0, 70.0, alone=False)]
    text = draw.section(draw.Field(record(*base, *slow, *shared)), ["Slow", "Other"])
    assert [row[3:7] for row in rows(text)] == [
        ["90.00 ± 0.00, 1 of 2 diverged", "60.00 (one seed)", "2 steps, 0.0 s", "20.00"],
        ["85.00 ± 5.00", "85.00 ± 5.00", "", "10.00"],
        ["70.00 (one seed)", "no time", "never", ""],
    ]
    assert "Not run yet: Other." in text


def test_without_the_baseline_the_table_says_so() -> None:
    text = draw.section(draw.Field(record(ran("Other", 0.1, 0, 70.0))), [])
    assert [row[3:7] for row in rows(text)] == [["70.00 (one seed)", f"no {draw.BASELINE}", "", "10.00"]]


def test_somebody_who_always_diverged_has_run() -> None:
    runs = [ran(draw.BASELINE, 0.1, 0, 80.0), *(ran("Wild", lr, 0, None) for lr in (0.1, 0.3))]
    text = draw.report([record(*runs)], [draw.BASELINE, "Wild", "Other"])
    assert "| Wild | diverged |" in text
    assert "Diverged at every rate: Wild." in text
    assert "Not run yet: Other." in text


def test_what_is_checked_in_is_what_the_records_say() -> None:
    """After new records: python -m benchmarks.training.draw."""
    found = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    report = draw.report(found, contestants.CONTESTANTS)
    assert (RECORDS / "results.md").read_text() == report
    cited = (ROOT / "docs/choosing.md").read_text().split("<!-- rows of results.md -->")[1::2]
    assert cited
    assert {row for text in cited for row in text.splitlines() if re.match(r"\| \w", row)} <= {*report.splitlines()}
    for name in {record["task"] for record in found}:
        assert (ROOT / f"docs/images/training-{name}.svg").is_file()


def test_drawing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [ran(name, 0.1, seed, 80.0 + seed) for name in (draw.BASELINE, "Other") for seed in range(2)]
    draw.picture(draw.Field(record(*runs)), tmp_path)
    assert "Other, lr 0.1" in (tmp_path / "training-fashion-512.svg").read_text()


def test_drawing_what_ran_with_one_seed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [ran(draw.BASELINE, 0.1, 0, 80.0), ran("Other", 0.1, 0, 81.0)]
    draw.picture(draw.Field(record(*runs)), tmp_path)
    assert "Other, lr 0.1" in (tmp_path / "training-fashion-512.svg").read_text()


def test_drawing_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no records"):
        draw.main(["--records", str(tmp_path), "--pictures", str(tmp_path)])
    assert not list(tmp_path.iterdir())


# ---- the runs


def line_task(name: str, device: str, data: Path | None, *, tiny: bool) -> Task:
    """A line through four points."""
    x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])

    def loss(model: Any, chosen: Any) -> Any:
        return (model(x[chosen]) - 3 * x[chosen]).square().mean()

    def score(model: Any, part: str, quick: bool) -> float:
        return float(loss(model, torch.arange(4)))

    made: dict[str, Any] = {"about": "a line", "steps": 20, "batch_size": 2, "choices": 4, "epochs": True}
    made |= {"model": lambda: torch.nn.Linear(1, 1), "loss": loss, "score": score, "higher_is_better": False}
    return Task(name=name, clip=1.0, decay=0.0, fingerprint="points", **made)


def test_runs_resume_and_the_two_best_rates_run_every_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "task", line_task)
    monkeypatch.setattr(run, "check_task", lambda name, data: None)
    failing = contestants.Contestant("nobody", contestants.peer("torch.optim.NoSuch"), 1.0, 1.0)
    monkeypatch.setitem(run.CONTESTANTS, "torch broken", failing)
    given = ["--tasks", "line", "--contestants", "torch broken;torch SGD", "--device", "cpu", "--trials", "3"]
    given += ["--records", str(tmp_path)]
    run.main([*given, "--budget-seconds", "0"])
    assert "the time is over" in capsys.readouterr().out
    run.main(given)
    assert "torch broken failed: AttributeError" in capsys.readouterr().out
    first = json.loads((tmp_path / "line.json").read_text())["runs"]
    assert [one["lr"] for one in first] == [0.1, 0.3, 0.033]
    run.main([*given, "--seeds", "3"])
    runs = json.loads((tmp_path / "line.json").read_text())["runs"]
    assert runs[:3] == first
    best = protocol.finalists(first, False)
    assert [(one["lr"], one["seed"]) for one in runs[3:]] == [(lr, seed) for lr in best for seed in (1, 2)]
    with pytest.raises(SystemExit, match="steps 20, this run has 5"):
        run.main([*given, "--steps", "5"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--contestants LAMB,Kron", "nobody is called 'LAMB,Kron'; put ; between names, which are torch AdamW; Kron;"),
        ("--tasks text,texts", "there is no task 'texts': tasks are text, "),
        ("--tasks text,fashion-512", "fashion-512 needs --data"),
        ("--tasks text,fashion-512 --data nowhere", "nowhere is not a folder"),
        ("--tasks fashion-0 --data nowhere", "there is no task 'fashion-0'"),
        ("--tasks ,", "name at least one"),
        ("--trials 0", "argument --trials: it must be a whole number from 1 on, got '0'"),
        ("--seeds 0", "argument --seeds: it must be a whole number from 1 on"),
        ("--steps -3", "argument --steps: it must be a whole number from 1 on, got '-3'"),
        ("--device gpu", "argument --device: it must be cpu or cuda, got 'gpu'"),
    ],
)
def test_what_cannot_be_is_told_before_anything_trains(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "task", lambda *a, **k: pytest.fail("it began to train"))
    with pytest.raises(SystemExit) as stopped:
        run.main(["--device", "cpu", "--records", str(tmp_path), *given.split(" ")])
    assert told in f"{stopped.value.code} {capsys.readouterr().err}"


def test_records_that_cannot_be_kept_stop_everyone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "task", line_task)
    monkeypatch.setattr(run, "check_task", lambda name, data: None)
    given = ["--tasks", "line", "--contestants", "torch SGD;torch AdamW", "--device", "cpu", "--trials", "1"]
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(SystemExit, match=r"--records .*file cannot be used"):
        run.main([*given, "--records", str(in_the_way)])
    (tmp_path / "line.new").mkdir()  # as a disk that is full: found out when the first run is finished
    with pytest.raises(SystemExit, match=r"line\.json cannot be written"):
        run.main([*given, "--records", str(tmp_path)])
    (tmp_path / "line.json").write_text('{"task": "line"')
    with pytest.raises(SystemExit, match=r"line\.json is damaged"):
        run.main([*given, "--records", str(tmp_path)])
    (tmp_path / "line.json").write_text('{"task": "line"}')
    with pytest.raises(SystemExit, match=r"line\.json is no record of a task"):
        run.main([*given, "--records", str(tmp_path)])


def test_earlier_records_are_added_and_overwrite_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "task", line_task)
    monkeypatch.setattr(run, "check_task", lambda name, data: None)

    def train(who: str, folder: str, *more: str) -> list[str]:
        given = ["--tasks", "line", "--contestants", who, "--device", "cpu", "--trials", "1", *more]
        run.main([*given, "--records", str(tmp_path / folder)])
        return [one["contestant"] for one in json.loads((tmp_path / folder / "line.json").read_text())["runs"]]

    train("torch SGD", "earlier")
    train("torch AdamW", "now")
    earlier = ["--resume", str(tmp_path / "earlier")]
    assert train("Lion", "now", *earlier) == ["torch SGD", "torch AdamW", "Lion"]
    assert train("torch SGD", "now", *earlier) == ["torch SGD", "torch AdamW", "Lion"]


def test_a_run_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*given: Any, **named: Any) -> Task:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "task", stopped)
    with pytest.raises(SystemExit) as left:
        run.main(["--tasks", "text", "--device", "cpu", "--records", str(tmp_path)])
    assert left.value.code == 130
    assert "the same command goes on from there" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what peers import
@pytest.mark.parametrize(
    "name",
    [
        # its import takes seconds
        pytest.param(name, marks=[pytest.mark.nightly] if made.package == "kron_torch" else [])
        for name, made in contestants.CONTESTANTS.items()
    ],
)
def test_a_contestant_can_be_made_and_is_known_again(name: str) -> None:
    made = contestants.CONTESTANTS[name]
    if importlib.util.find_spec(made.package) is None:
        pytest.skip(f"{made.package} is not installed")
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    first, second = (run.settings_of(made.make(model, made.text, 0.1)) for _ in range(2))
    assert first == second


def test_an_object_among_settings_has_no_address() -> None:
    assert run.told([object()]) == "[<object object>]"


def test_tokens_are_the_text_again() -> None:
    text = b"def f(x):\n    return f(x + 1) if x else f(2)\n" * 3
    words = corpus.WORDS.findall(text)
    assert b"".join(words) == text
    merges = corpus.learn_merges(corpus.Counter(words), 10)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    known = {byte: bytes([byte]) for byte in range(256)}
    for rank, (left, right) in enumerate(merges):
        known[256 + rank] = known[left] + known[right]
    tokens = [token for word in words for token in corpus.encoded(word, ranks)]
    assert b"".join(known[token] for token in tokens) == text
    assert len(tokens) < len(text)
