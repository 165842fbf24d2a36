"""The search for learning rates: hopeless runs stop, edges are left behind, and everyone has as many trials."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from race_tasks import bowl, parabola

from thalweg.race import race
from thalweg.race.contest import Race
from thalweg.race.run import Run

PLAIN = {"": {"momentum": 0.0}}
SGD: dict[str, Any] = dict(optimizers=["SGD"], options=PLAIN)  # whose grid is 0.01 to 1


def rates_of(ready: Race, name: str = "SGD") -> list[float]:
    """In the order in which they were tried."""
    return [run.lr for run in ready.records if run.contestant == name and run.seed == 0]


@pytest.mark.parametrize(
    ("best", "beyond", "added", "chosen"),
    [
        (3.0, 3, [3.33, 11.1], 3.33),
        (0.001, 3, [0.00333, 0.00111, 0.00037], 0.00111),
        (1e-9, 3, [0.00333, 0.00111, 0.00037], 0.00037),
        (1e-9, 0, [], 0.01),
    ],
)
def test_a_grid_is_widened_beyond_the_edge_where_the_best_is_and_no_further_than_allowed(
    best: float, beyond: int, added: list[float], chosen: float
) -> None:
    ready = race(bowl(best), full=True, beyond=beyond, **SGD)
    summary = ready.run().summary
    assert (rates_of(ready)[5:], summary["results"][0]["lr"]) == (added, chosen)
    assert (f" {len(added)} of them beside the grid, because" in summary["conditions"]) == bool(added)
    assert ("At the edge of its rates: SGD." in summary["conditions"]) == (chosen == min([*added, 0.01]))


def test_everyone_gets_as_many_trials_and_given_rates_stay_as_they_are() -> None:
    both = ["SGD", "AdamW"]
    ready = race(bowl(3.0), optimizers=both, options=PLAIN, full=True).run()
    assert len(rates_of(ready)) == len(rates_of(ready, "AdamW")) > 5
    given = race(bowl(3.0), optimizers=both, options={"adamw": {"lr": [0.3, 0.1, 0.2]}, **PLAIN}, full=True).run()
    assert sorted(rates_of(given, "AdamW")) == [0.1, 0.2, 0.3]
    assert len(rates_of(given)) > 5


def test_where_all_diverge_lower_rates_are_tried() -> None:
    task = bowl(1.0, evaluate=lambda params: 1.0 if abs(float(params["x"][0])) < 0.05 else math.nan)
    (result,) = race(task, **SGD).run().summary["results"]
    assert result["loss"] == 1.0
    assert result["lr"] < 0.01


def test_hopeless_runs_stop_and_the_best_quarter_of_the_rates_runs_with_the_other_seeds() -> None:
    ready = race(bowl(0.1), seeds=3, **SGD)
    summary = ready.run().summary
    assert ready.progress == (9, 9)
    assert rates_of(ready) == [0.1, 0.03, 0.3, 0.01, 1.0], "from the middle, and not beyond where the best is inside"
    repeated = sorted(run.lr for run in ready.records if run.seed > 0)
    assert repeated in ([0.03, 0.03, 0.1, 0.1], [0.1, 0.1, 0.3, 0.3]), "two at least"
    (result,) = summary["results"]
    assert (result["lr"], result["seeds"]) == (0.1, 3)
    assert result["sweep"]["stopped"] == [8, None, None, None, 8]
    assert "Hopeless and stopped early: 2 of 9 runs (--full finishes all)." in summary["conditions"]


def test_a_race_goes_on_with_more_seeds_and_to_the_end(tmp_path: Path) -> None:
    def ran(**asked: Any) -> tuple[set[tuple[float, int]], set[tuple[float, int]]]:
        """What was run, and what is stopped after it."""
        runs: list[Run] = []
        ready = race(bowl(0.1), folder=tmp_path, **SGD, **asked).run(runs.append)
        stopped = {(run.lr, run.seed) for run, record in ready.records.items() if record.stopped}
        return {(run.lr, run.seed) for run in runs}, stopped

    (first, _), (more, stopped) = ran(seeds=3), ran(seeds=5)
    assert {(lr, seed) for lr, seed in more} == {(lr, seed) for lr, one in first if one == 1 for seed in (3, 4)}
    finished, left = ran(seeds=3, full=True)
    assert finished >= stopped > left == set()
    assert ran(seeds=3, full=True) == (set(), set())


def test_an_interrupted_search_ends_as_one_that_was_not(tmp_path: Path) -> None:
    def stop(run: Run) -> None:
        raise KeyboardInterrupt

    asked: dict[str, Any] = dict(optimizers=["SGD", "AdamW"], seeds=2)
    whole = race(bowl(3.0), **asked).run()
    while (part := race(bowl(3.0), folder=tmp_path, **asked)).waiting:
        with pytest.raises(KeyboardInterrupt):
            part.run(stop)
    assert list(part.records.items()) == list(whole.records.items())


@pytest.mark.parametrize("damaged", [b"not JSON", b"3", b"{}", b"\xff", b"[" * 99999, b"a loss that is text"])
def test_lines_that_are_no_records_are_skipped_counted_and_their_runs_run_again(damaged: bytes, tmp_path: Path) -> None:
    asked: dict[str, Any] = dict(optimizers=["SGD"], options={"": {"lr": [0.1, 0.2, 0.3]}}, folder=tmp_path)
    whole = race(parabola(), **asked).run().records
    path = tmp_path / "runs.jsonl"
    first, second, third = path.read_bytes().splitlines()
    damaged = second.replace(b'"loss": [', b'"loss": ["x", ') if damaged.startswith(b"a") else damaged
    path.write_bytes(b"\n".join([first, damaged, b"", third[:-30]]))
    again = race(parabola(), **asked)
    assert (again.skipped, len(again.waiting)) == (2, 2)
    again.run()
    last = race(parabola(), **asked)
    assert (last.records, last.waiting) == (whole, [])
