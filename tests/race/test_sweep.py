"""The search for learning rates: hopeless runs stop, edges are left behind, and everyone has as many trials."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from race_tasks import bowl, parabola

from thalweg.errors import CommandError
from thalweg.race import race
from thalweg.race.contest import Race
from thalweg.race.run import read_records
from thalweg.race.task import Run

SGD = dict(optimizers=["SGD"], options={"": {"momentum": 0.0}})  # whose grid is 0.01 to 1


def rates_of(ready: Race, name: str = "SGD") -> list[float]:
    """In the order in which they were tried."""
    return [run.lr for run in ready.records if run.contestant == name and run.seed == 0]


@pytest.mark.parametrize(
    ("best", "added", "chosen"),
    [
        (3.0, [3.33, 11.1], 3.33),
        (0.001, [0.00333, 0.00111, 0.00037], 0.00111),
        (1e-9, [0.00333, 0.00111, 0.00037], 0.00037),
    ],
)
def test_a_grid_is_widened_beyond_the_edge_where_the_best_is_and_no_further_than_allowed(
    best: float, added: list[float], chosen: float
) -> None:
    ready = race(bowl(best), full=True, **SGD)
    summary = ready.run().summary
    assert rates_of(ready)[5:] == added
    assert summary["results"][0]["lr"] == chosen
    assert f"{len(added)} of them beside the grid, because a best rate was at its edge" in summary["search"]
    assert ("At the edge of its rates: SGD." in summary["search"]) == (chosen == added[-1])


def test_how_far_beyond_the_edge_a_grid_may_go() -> None:
    for beyond, added in ((0, []), (1, [0.00333]), (4, [0.00333, 0.00111, 0.00037, 0.000123])):
        ready = race(bowl(1e-9), beyond=beyond, **SGD)
        ready.run()
        assert rates_of(ready)[5:] == added
    with pytest.raises(CommandError, match="beyond must be a whole number from 0 on, got -1"):
        race(bowl(0.1), beyond=-1)


def test_everyone_gets_as_many_trials_and_given_rates_stay_as_they_are() -> None:
    both = dict(optimizers=["SGD", "AdamW"], options=SGD["options"], full=True)
    ready = race(bowl(3.0), **both)
    ready.run()
    counts = Counter(run.contestant for run in ready.records)
    assert counts["SGD"] == counts["AdamW"] > 5
    given = race(bowl(3.0), rates={"adamw": [0.1, 0.2, 0.3]}, **both)
    given.run()
    assert sorted(rates_of(given, "AdamW")) == [0.1, 0.2, 0.3]
    assert len(rates_of(given)) > 5


def test_where_all_diverge_lower_rates_are_tried() -> None:
    task = bowl(1.0, evaluate=lambda params: 1.0 if abs(float(params["x"][0])) < 0.05 else math.nan)
    (result,) = race(task, **SGD).run().summary["results"]
    assert result["loss"] == 1.0
    assert result["lr"] < 0.01


def test_hopeless_runs_stop_and_their_records_say_where() -> None:
    ready = race(bowl(0.1), seeds=3, **SGD)
    assert ready.progress == (0, 5 + 2 * 2)
    summary = ready.run().summary
    assert rates_of(ready) == [0.1, 0.03, 0.3, 0.01, 1.0], "from the middle, and not beyond where the best is inside"
    ends = {run.lr: record.result.step[-1] for run, record in ready.records.items() if run.seed == 0}
    assert ends == {0.1: 16, 0.03: 16, 0.3: 16, 0.01: 8, 1.0: 8}
    repeated = Counter(run.lr for run in ready.records if run.seed > 0)
    assert repeated[0.1] == 2
    assert len(repeated) == 2, "a quarter of the grid, and two at least, run with the other seeds"
    (result,) = summary["results"]
    assert (result["lr"], result["seeds"]) == (0.1, 3)
    assert [step is not None for step in result["sweep"]["stopped"]] == [True, False, False, False, True]
    assert "Hopeless and stopped early: 2 of 9 runs (--full finishes all)." in summary["search"]


def test_a_race_goes_on_with_more_seeds_and_to_the_end(tmp_path: Path) -> None:
    def ran(**asked: Any) -> set[tuple[float, int]]:
        runs: list[Run] = []
        race(bowl(0.1), folder=tmp_path, **SGD, **asked).run(on_run=runs.append)
        return {(run.lr, run.seed) for run in runs}

    first = ran(seeds=3)
    more = ran(seeds=5)
    assert len(first) == 5 + 2 * 2
    assert {seed for _, seed in more} == {3, 4}
    assert {lr for lr, _ in more} == {lr for lr, seed in first if seed == 1}, "the same two rates"
    stopped = {(run.lr, run.seed) for run, record in read_records(tmp_path / "runs.jsonl")[0].items() if record.stopped}
    assert stopped
    assert ran(seeds=3, full=True) >= stopped
    assert not any(record.stopped for record in read_records(tmp_path / "runs.jsonl")[0].values())
    assert not ran(seeds=3, full=True)


def test_an_interrupted_search_ends_as_one_that_was_not(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(run: Run) -> None:
        raise Stop

    asked: dict[str, Any] = dict(optimizers=["SGD", "AdamW"], seeds=2)
    whole = race(bowl(3.0), **asked).run()
    while (part := race(bowl(3.0), folder=tmp_path, **asked)).waiting:
        with pytest.raises(Stop):
            part.run(on_run=stop)
    assert part.records == whole.records
    assert list(part.records) == list(whole.records)


def test_lines_that_are_no_records_are_skipped_counted_and_their_runs_run_again(tmp_path: Path) -> None:
    def ready() -> Race:
        return race(parabola(), optimizers=["SGD"], rates={"": [0.1, 0.2, 0.3]}, folder=tmp_path)

    whole = ready().run().records
    path = tmp_path / "runs.jsonl"
    first, second, third = path.read_bytes().splitlines()
    for damaged in (b"not JSON", b"3", b"{}", b"\xff", b"[" * 99999, second.replace(b'"loss": [', b'"loss": ["x", ')):
        path.write_bytes(b"\n".join([first, damaged, b"", third[:-30]]))
        again = ready()
        assert (again.skipped, len(again.waiting)) == (2, 2)
        again.run()
        assert (ready().records, ready().waiting) == (whole, [])
