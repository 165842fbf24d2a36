"""The search for learning rates: hopeless runs stop, edges are left behind, and everyone has as many trials."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import Race, load_race, race
from thalweg.race.sweep import plan
from thalweg.race.task import Run

#: After 16 steps of SGD the loss is least at the rate ``best``; how far a rate is off shows from the first step on.
STEPS = 16


def bowl(best: float, **changes: Any) -> ArrayTask:
    """Weights that are never stepped well: the loss tells how far the learning rate is from the best, and falls."""

    def evaluate(params: dict[str, Any]) -> float:
        moved = float(params["x"][0])  # SGD adds lr at each step, falling to 0: 8.5 lr in all
        return 2.0 + abs(math.log(max(moved, 1e-12) / (8.5 * best))) if moved else 100.0

    task = ArrayTask(
        name="bowl",
        init=lambda seed: {"x": np.zeros(1)},
        gradients=lambda params, batch: {"x": -np.ones(1)},
        evaluate=evaluate,
        steps=STEPS,
        seeds=1,
        rates={"SGD": (0.01, 0.03, 0.1, 0.3, 1.0), "AdamW": (0.01, 0.03, 0.1, 0.3, 1.0)},
        options={"SGD": {"momentum": 0.0}},
    )
    return replace(task, **changes)


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
    ready = race(bowl(best, halving=False), optimizers=["SGD"])
    (course,) = ready.run().summary["courses"]
    assert rates_of(ready)[5:] == added
    assert course["results"][0]["lr"] == chosen
    assert f"{len(added)} of them beside the grid, because a best rate was at its edge" in course["search"]


def test_whoever_asks_says_how_far_beyond_the_edge_a_grid_may_go() -> None:
    for beyond, added in ((0, []), (1, [0.00333]), (4, [0.00333, 0.00111, 0.00037, 0.000123])):
        ready = race(bowl(1e-9), optimizers=["SGD"], beyond=beyond)
        ready.run()
        assert rates_of(ready)[5:] == added
    with pytest.raises(CommandError, match="beyond must be a whole number from 0 on, got -1"):
        race(bowl(0.1), beyond=-1)


def test_everyone_gets_as_many_trials_and_given_rates_stay_as_they_are() -> None:
    task = bowl(3.0, halving=False)
    ready = race(task, optimizers=["SGD", "AdamW"])
    ready.run()
    counts = Counter(run.contestant for run in ready.records)
    assert counts["SGD"] == counts["AdamW"] > 5
    given = race(task, optimizers=["SGD", "AdamW"], rates={"AdamW": [0.1, 0.2, 0.3]})
    given.run()
    assert sorted(rates_of(given, "AdamW")) == [0.1, 0.2, 0.3]
    single = race(replace(task, rates={**task.rates, "AdamW": [0.1]}), optimizers=["SGD", "AdamW"])
    single.run()
    assert (len(rates_of(single)) > 5, rates_of(single, "AdamW")) == (True, [0.1]), "nobody can tell where to look"


def test_where_all_diverge_lower_rates_are_tried() -> None:
    task = bowl(1.0, evaluate=lambda params: 1.0 if abs(float(params["x"][0])) < 0.05 else math.nan)
    ready = race(task, optimizers=["SGD"])
    (course,) = ready.run().summary["courses"]
    assert course["results"][0]["loss"] == 1.0
    assert course["results"][0]["lr"] < 0.01


def test_hopeless_runs_stop_and_their_records_say_where() -> None:
    ready = race(bowl(0.1), optimizers=["SGD"], seeds=3)
    (course,) = ready.run().summary["courses"]
    assert rates_of(ready) == [0.1, 0.03, 0.3, 0.01, 1.0], "from the middle, and not beyond where the best is inside"
    ends = {run.lr: record.result.step[-1] for run, record in ready.records.items() if run.seed == 0}
    assert ends == {0.1: 16, 0.03: 16, 0.3: 16, 0.01: 8, 1.0: 8}
    repeated = Counter(run.lr for run in ready.records if run.seed > 0)
    assert repeated[0.1] == 2
    assert len(repeated) == 2, "a quarter of the grid, and two at least, run with the other seeds"
    (result,) = course["results"]
    assert (result["lr"], result["seeds"]) == (0.1, 3)
    assert [step is not None for step in result["sweep"]["stopped"]] == [True, False, False, False, True]
    assert "2 of 9 runs were hopeless and stopped early" in course["search"]
    single = race(bowl(0.1), optimizers=["SGD"], seeds=1, rates={"SGD": [0.1, 0.03, 1.0]})
    (course,) = single.run().summary["courses"]
    assert "1 of 3 runs was hopeless and stopped early: --full finishes it." in course["search"]


def test_a_race_goes_on_with_more_seeds_more_rates_and_to_the_end(tmp_path: Path) -> None:
    def ran(**asked: Any) -> Counter[tuple[float, int]]:
        found: list[Run] = []
        race(bowl(0.1), optimizers=["SGD"], folder=tmp_path, **asked).run(on_run=found.append)
        return Counter((run.lr, run.seed) for run in found)

    first = ran(seeds=3)
    more = ran(seeds=5)
    assert len(first) == 5 + 2 * 2
    assert {seed for _, seed in more} == {3, 4}
    assert {lr for lr, _ in more} == {lr for lr, seed in first if seed == 1}, "the same two rates"
    assert set(ran(seeds=3, more_rates={"SGD": [0.2]})) >= {(0.2, 0)}
    stopped = {(run.lr, run.seed) for run, record in load_race(tmp_path)[0].records.items() if record.stopped}
    assert stopped
    rest = ran(seeds=3, full=True)
    assert set(rest) >= stopped
    outcome, _ = load_race(tmp_path)
    assert not any(record.stopped for record in outcome.records.values())
    assert outcome.summary["missing"] == 0
    assert set(outcome.summary["courses"][0]["results"][0]["sweep"]["stopped"]) == {None}
    assert not ran(seeds=3, full=True)


def test_an_interrupted_search_ends_as_one_that_was_not(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(run: Run) -> None:
        raise Stop

    task, asked = bowl(3.0), dict(optimizers=["SGD", "AdamW"], seeds=2)
    whole = race(task, **asked).run()  # type: ignore[arg-type]
    while (part := race(task, folder=tmp_path, **asked)).waiting:  # type: ignore[arg-type]
        with pytest.raises(Stop):
            part.run(on_run=stop)
    assert part.records == whole.records
    assert list(part.records) == list(whole.records)


def test_what_is_missing_counts_repetitions_that_are_not_decided_yet() -> None:
    ready = race(bowl(0.1), optimizers=["SGD"], seeds=3)
    (course,) = ready.programme.courses
    found = plan(course, {})
    assert (len(found.runs), len(found.waiting), found.later) == (5, 5, 2 * 2)
    assert ready.progress == (0, 9)


@pytest.mark.parametrize(
    ("losses", "stopped", "expected"),
    [
        # the best is the third; the first loss is 3.0, so that 2 % of what it won is 0.04
        ([1.5, 1.04, 1.0, 1.2, 1.5], [], (0.03, 0.1, False)),
        ([1.5, 1.2, 1.0, 1.04, 1.03], [], (0.1, 1.0, True)),
        ([1.5, 1.2, 1.0, 1.04, 1.04], [4], (0.1, 0.3, True)),
        ([1.0, 1.2, 1.0, None, 1.0], [], (0.1, 0.1, False)),
    ],
)
def test_how_sensitive_an_optimizer_is_to_its_rate(
    losses: list[float | None], stopped: list[int], expected: tuple[float, float, bool]
) -> None:
    from thalweg.race.summary import near

    rates = [0.01, 0.03, 0.1, 0.3, 1.0]
    sweep = {"lr": rates, "loss": losses, "stopped": [4 if i in stopped else None for i in range(5)]}
    found = near(sweep, 0.1, [3.0, losses[2]])
    assert found is not None
    assert (found["low"], found["high"], found["open"]) == expected
    assert near(sweep, 0.1, [3.0, None]) is None
