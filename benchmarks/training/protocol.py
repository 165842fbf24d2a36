"""The rules of the contest: how rates are searched, what a record is, and who has won.

Every contestant has the same number of trials on seed 0. The first three are a factor of 3 apart; each other one goes
where the best so far points: a factor of 3 beyond it if it lies at an edge, else halfway to its better neighbour. The
best rate is chosen by validation, and runs with other seeds; test is looked at for these runs alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FACTOR = 3.0
Run = dict[str, Any]


def rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def next_rate(tried: Mapping[float, float], middle: float) -> float:
    """The rate of the next trial. tried: the losses of rates; infinity for a run that diverged."""
    for rate in (middle, middle * FACTOR, middle / FACTOR):
        if rounded(rate) not in tried:
            return rounded(rate)
    rates = sorted(tried)
    place = rates.index(min(rates, key=lambda rate: tried[rate]))
    if math.isinf(tried[rates[place]]) or place == 0:
        return rounded(rates[0] / FACTOR)
    if place == len(rates) - 1:
        return rounded(rates[-1] * FACTOR)
    neighbours = sorted((rates[place - 1], rates[place + 1]), key=lambda rate: tried[rate])
    between = [rounded(math.sqrt(rates[place] * other)) for other in neighbours]
    return next((rate for rate in between if rate not in tried), between[0])


@dataclass
class Records:
    """The runs of a task, as they lie in a file."""

    path: Path
    #: What all runs of a file have in common; runs of another machine or corpus do not mix with them.
    identity: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def load(self, path: Path) -> None:
        if not path.is_file():
            return
        found = json.loads(path.read_text())
        for key, value in self.identity.items():
            if found[key] != value:
                raise SystemExit(f"{path} has {key} {found[key]!r}, this run has {value!r}: give another --records")
        self.runs = found["runs"]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = ",\n".join(json.dumps(each) for each in self.runs)
        head = json.dumps(self.identity)[1:-1]
        new = self.path.with_suffix(".new")
        new.write_text(f'{{{head}, "runs": [\n{lines}\n]}}\n')
        new.replace(self.path)

    def of(self, contestant: str, settings: Mapping[str, Any]) -> list[Run]:
        return [run for run in self.runs if run["contestant"] == contestant and run["settings"] == settings]


def loss_of(run: Run, higher_is_better: bool) -> float:
    """What the search makes as small as it can."""
    score = run["validation"]
    return math.inf if score is None else -score if higher_is_better else score


def best(runs: Sequence[Run], higher_is_better: bool) -> Run | None:
    """The best run of seed 0, unless all diverged."""
    first = [run for run in runs if run["seed"] == 0 and run["validation"] is not None]
    return min(first, key=lambda run: loss_of(run, higher_is_better)) if first else None


@dataclass(frozen=True)
class Result:
    """A contestant at its best rate."""

    contestant: str
    lr: float
    trials: int
    seeds: int
    validation: float
    test: float
    #: Half of the difference between the best and the worst seed.
    spread: float
    ms: float
    state_bytes: int
    curve: list[tuple[int, float]]
    at_edge: bool


def results(record: Mapping[str, Any]) -> list[Result]:
    """Every contestant's result, best first."""
    higher = record["higher_is_better"]
    found = []
    for contestant in dict.fromkeys(run["contestant"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["contestant"] == contestant]
        runs = [run for run in runs if run["settings"] == runs[-1]["settings"]]  # the latest settings of that name
        chosen = best(runs, higher)
        if chosen is None:
            continue
        seeds = [run for run in runs if run["lr"] == chosen["lr"] and run["validation"] is not None]
        rates = sorted({run["lr"] for run in runs})
        tests = [run["test"] for run in seeds]
        alone = [run["ms"] for run in runs if run["alone"]] or [run["ms"] for run in runs]
        found.append(
            Result(
                contestant=contestant,
                lr=chosen["lr"],
                trials=len(rates),
                seeds=len(seeds),
                validation=statistics.mean(run["validation"] for run in seeds),
                test=statistics.mean(tests),
                spread=(max(tests) - min(tests)) / 2,
                ms=statistics.median(alone),
                state_bytes=chosen["state_bytes"],
                curve=[tuple(point) for point in chosen["curve"]],
                at_edge=chosen["lr"] in (rates[0], rates[-1]),
            )
        )
    return sorted(found, key=lambda result: -result.test if higher else result.test)


def steps_to(curve: Sequence[tuple[int, float]], wanted: float, higher_is_better: bool) -> float | None:
    """The step at which a curve reaches a score, between two of its points; None if it never does."""
    sign = -1.0 if higher_is_better else 1.0
    before: tuple[int, float] | None = None
    for step, score in curve:
        if sign * score <= sign * wanted:
            if before is None or before[1] == score:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - wanted) / (before[1] - score)
        before = (step, score)
    return None
