"""The suite of training runs: its tasks and contestants race, runs resume, and the tables are what the records say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from thalweg.race.contest import RECORDS, race
from thalweg.race.run import Record, Result, read_records
from thalweg.race.task import Run

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks.training import contestants, corpus, draw, run
    from benchmarks.training.tasks import SuiteTask
finally:
    sys.path.remove(str(ROOT))

RESULTS = ROOT / "benchmarks/training/results"


def ran(who: str, lr: float, seed: int, score: float | None, *, ms: float = 10.0, shared: bool = False) -> Record:
    """A run of two measures, 60 percent right and its last."""
    made_of = {"task": "t", "fingerprint": "x", "contestant": who, "optimizer": who, "batch_size": 512, "steps": 2}
    own = Run(**made_of, lr=lr, seed=seed, engine="auto", device="cpu", thalweg="")
    loss = None if score is None else round(1 - score / 100, 6)
    result = Result(
        step=(1, 2),
        seconds=(ms / 1000, 2 * ms / 1000),
        loss=(0.4, loss),
        score=(None, None if score is None else score / 100),
        parameters=100,
        state_bytes=800,
        engine="",
    )
    where = {"versions": {"torch": "2"}, "machine": {}, **({"shared": True} if shared else {})}
    return Record(own, result, where)


def field(*records: Record) -> draw.Field:
    task = {"title": "fashion-512", "about": "percent", "steps": 2, "batch_size": 512, "best_score": "most"}
    return draw.Field(task, records)


# ---- the tables


def rows(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]


def test_losses_and_steps_between_points_of_a_curve() -> None:
    curve = [(10, 4.0), (20, 2.0)]
    assert [draw.loss_at(curve, step) for step in (5, 10, 15, 30)] == [None, 4.0, 3.0, 2.0]
    assert [draw.steps_to(curve, wanted) for wanted in (5.0, 3.0, 1.0)] == [10.0, 15.0, None]


def test_a_table_tells_of_seeds_that_diverged_and_of_times_that_do_not_count() -> None:
    base = [ran(draw.BASELINE, 0.1, seed, score) for seed, score in enumerate((80.0, 90.0))]
    slow = [ran("Slow", 0.1, seed, score, ms=20.0) for seed, score in enumerate((90.0, None))]
    shared = [ran("Shared", 0.1, 0, 70.0, shared=True)]
    text = draw.write_section(field(*base, *slow, *shared), ["Slow", "Other"])
    assert [row[3:7] for row in rows(text)] == [
        ["90.00 ± 0.00, 1 of 2 diverged", "60.00 (one seed)", "2 steps, 0.0 s", "20.00"],
        ["85.00 ± 5.00", "85.00 ± 5.00", "", "10.00"],
        ["70.00 (one seed)", "no time", "never", ""],
    ]
    assert "Not run yet: Other." in text
    text = draw.write_section(field(ran("Other", 0.1, 0, 70.0)), [])
    assert [row[3:7] for row in rows(text)] == [["70.00 (one seed)", f"no {draw.BASELINE}", "", "10.00"]]


def test_somebody_who_always_diverged_has_run() -> None:
    found = field(ran(draw.BASELINE, 0.1, 0, 80.0), *(ran("Wild", lr, 0, None) for lr in (0.1, 0.3)))
    text = draw.write_report({"fashion-512": found}, [draw.BASELINE, "Wild", "Other"])
    assert "| Wild | diverged |" in text
    assert "Diverged at every rate: Wild." in text
    assert "Not run yet: Other." in text


def test_what_is_checked_in_is_what_the_records_say() -> None:
    """After new records: python -m benchmarks.training.draw."""
    found = draw.load_fields(RESULTS)
    report = draw.write_report(found, contestants.CONTESTANTS)
    assert (RESULTS / "results.md").read_text() == report
    cited = (ROOT / "docs/choosing.md").read_text().split("<!-- rows of results.md -->")[1::2]
    assert cited
    assert {row for text in cited for row in text.splitlines() if re.match(r"\| \w", row)} <= {*report.splitlines()}
    assert (ROOT / "docs/images/training-text.svg").is_file()


def test_every_line_of_the_records_is_read() -> None:
    for path in RESULTS.glob(f"*/{RECORDS}"):
        records, skipped = read_records(path)
        assert (len(records), skipped) == (len(path.read_text().splitlines()), 0)


@pytest.mark.parametrize("seeds", [1, 2])
def test_drawing(seeds: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = [ran(name, 0.1, seed, 80.0 + seed) for name in (draw.BASELINE, "Other") for seed in range(seeds)]
    draw.draw_picture(field(*records), tmp_path)
    assert "Other, lr 0.1" in (tmp_path / "training-fashion-512.svg").read_text()


def test_drawing_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="holds no records"):
        draw.main(["--records", str(tmp_path), "--pictures", str(tmp_path)])
    assert not list(tmp_path.iterdir())


# ---- the runs


def line_task(name: str, data: Path | None, *, tiny: bool) -> SuiteTask:
    """A line through four points."""
    x = torch.tensor([[-1.0], [0.0], [1.0], [2.0]])

    def loss(model: Any, chosen: Any) -> Any:
        return (model(x[chosen]) - 3 * x[chosen]).square().mean()

    return SuiteTask(
        name=name,
        title=name,
        about="a line",
        steps=20,
        batch_size=2,
        best_score="least",
        model=lambda seed: torch.nn.Linear(1, 1),
        batches=lambda seed, size: iter([torch.tensor([0, 2]), torch.tensor([1, 3])] * 10),
        loss=loss,
        evaluate=lambda model: pytest.fail("it is scored instead"),
        score=lambda model, part, quick: float(loss(model, torch.arange(4))),
        data={},
        max_grad_norm=1.0,
        decay=0.1,
        fingerprint="points",
    )


def test_runs_resume_and_the_best_rates_run_every_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(run, "make_task", line_task)
    monkeypatch.setattr(run, "check_task", lambda name, data: None)
    given = ["--tasks", "line", "--contestants", "torch SGD", "--device", "cpu", "--records", str(tmp_path)]
    run.main([*given, "--beyond", "0"])
    first = read_records(tmp_path / "line" / RECORDS)[0]
    assert sorted(one.lr for one in first) == [0.033, 0.1, 0.3]
    run.main([*given, "--beyond", "0", "--seeds", "3"])
    records = read_records(tmp_path / "line" / RECORDS)[0]
    assert list(records)[:3] == list(first)
    best = sorted(first, key=lambda one: first[one].result.loss[-1] or 0.0)[:2]
    assert {(one.lr, one.seed) for one in list(records)[3:]} == {(one.lr, seed) for one in best for seed in (1, 2)}
    run.main([*given, "--beyond", "0", "--contestants", "Lion"])
    assert draw.load_fields(tmp_path)["line"].entered == ["torch SGD", "Lion"]


def test_test_data_are_scored_once_at_the_end_and_rates_rise_first() -> None:
    task = line_task("line", None, tiny=True)
    ready = race(task, optimizers=[contestants.enter("torch SGD", task)], rates={"": [0.1]})
    (record,) = ready.run().records.values()
    assert record.result.score is not None
    assert [score is not None for score in record.result.score] == [False] * (len(record.result.score) - 1) + [True]
    assert record.result.score[-1] == record.result.loss[-1]
    assert record.result.engine == "torch"


def test_two_optimizers_step_as_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    optimizer = contestants.make_torch_muon(model, lr=0.1, weight_decay=0.1, adamw_lr=0.01)
    model(torch.ones(2, 4)).square().sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))
    assert len(optimizer.state) == len(before)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--contestants LAMB,Kron", "nobody is called 'LAMB,Kron'; put ; between names, which are torch AdamW; Kron;"),
        ("--tasks text,texts", "there is no task 'texts': tasks are text, "),
        ("--tasks text,fashion-512", "fashion-512 needs --data"),
        ("--tasks fashion-0 --data nowhere", "there is no task 'fashion-0'"),
        ("--tasks ,", "--tasks: nothing is left of ','"),
    ],
)
def test_what_cannot_be_is_told_before_anything_trains(
    given: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "make_task", lambda *a, **k: pytest.fail("it began to train"))
    with pytest.raises(SystemExit) as stopped:
        run.main(["--device", "cpu", "--records", str(tmp_path), *given.split(" ")])
    assert told in str(stopped.value.code)


def test_a_run_that_is_stopped_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*given: Any, **named: Any) -> SuiteTask:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "make_task", stop)
    with pytest.raises(SystemExit) as left:
        run.main(["--tasks", "text", "--device", "cpu", "--records", str(tmp_path)])
    assert left.value.code == 130
    assert "the same command goes on from there" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what peers import
@pytest.mark.parametrize(
    "name",
    [
        # its import takes seconds
        pytest.param(name, marks=[pytest.mark.nightly] if entry.package == "kron_torch" else [])
        for name, entry in contestants.CONTESTANTS.items()
    ],
)
def test_a_contestant_can_be_made_and_is_known_again(name: str) -> None:
    package = contestants.CONTESTANTS[name].package
    for needed in (package, *(["torchvision"] if package == "timm" else [])):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    task = line_task("line", None, tiny=True)
    first, second = (contestants.enter(name, task) for _ in range(2))
    assert str(first) == str(second)
    assert " at 0x" not in str(first)
    assert first.make is not None
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 8))
    assert isinstance(first.make(model, lr=first.rates[1], **first.options), torch.optim.Optimizer)


def test_tokens_are_the_text_again() -> None:
    text = b"def f(x):\n    return f(x + 1) if x else f(2)\n" * 3
    words = corpus.WORDS.findall(text)
    assert b"".join(words) == text
    merges = corpus.learn_merges(corpus.Counter(words), 10)
    ranks = {pair: rank for rank, pair in enumerate(merges)}
    known = {byte: bytes([byte]) for byte in range(256)}
    for rank, (left, right) in enumerate(merges):
        known[256 + rank] = known[left] + known[right]
    tokens = [token for word in words for token in corpus.encode(word, ranks)]
    assert b"".join(known[token] for token in tokens) == text
    assert len(tokens) < len(text)
