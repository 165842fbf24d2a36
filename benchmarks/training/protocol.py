"""The rules of the contest: how rates are searched, what a record is, and who has won.

Every contestant has the same number of trials on seed 0, and ``--beyond`` more while the best lies at an edge.
The first three are a factor of 3 apart; each other one goes where the best so far points: a factor of 3 beyond it if it
lies at an edge, else halfway to its better neighbour. The two best rates then run with every other seed, and the better
mean on validation is chosen: a rate that is best once may be one at which another seed diverges. Test is looked at for
the chosen rate alone.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.race import sweep

FACTOR = 3.0
#: The rates that run with every seed.
FINALISTS = 2
TEXTS = ("text", "text-plain", "text-124m")
TASKS = (*TEXTS, "fashion-512", "fashion-2048", "fashion-8192", "vit-1024")
#: What runs of a file have in common.
IDENTITY = (
    *("task", "about", "steps", "batch_size", "higher_is_better"),
    *("parameters", "data", "device", "torch"),
)
Run = dict[str, Any]
Curve = Sequence[tuple[int, float]]


def rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def next_rate(tried: Mapping[float, float], middle: float) -> float:
    """The rate of the next trial. tried: the losses of rates; infinity for a run that diverged."""
    for rate in (middle, middle * FACTOR, middle / FACTOR):
        if rounded(rate) not in tried:
            return rounded(rate)
    return sweep.next_rate(tried, diverged=math.isinf(min(tried.values())), beyond=FACTOR, digits=2)


def at_edge(best: float, tried: Collection[float]) -> bool:
    """Whether a rate beyond the best might be better: it is the least or the largest that was tried."""
    return best in (min(tried), max(tried))


@dataclass
class Records:
    """The runs of a task, as they lie in a file."""

    path: Path
    #: What all runs of a file have in common; runs of another machine or corpus do not mix with them.
    identity: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def load(self, path: Path) -> None:
        """Add the runs of a file to those that are known."""
        if not path.is_file():
            return
        found = read(path)
        for key, value in self.identity.items():
            if found[key] != value:
                raise CommandError(f"{path} has {key} {found[key]!r}, this run has {value!r}: give another --records")
        self.runs += [run for run in found["runs"] if run not in self.runs]

    def add(self, run: Run) -> None:
        self.runs.append(run)
        lines = ",\n".join(json.dumps(each) for each in self.runs)
        head = json.dumps(self.identity)[1:-1]
        new = self.path.with_suffix(".new")
        try:
            new.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(f'{{{head}, "runs": [\n{lines}\n]}}\n')
            new.replace(self.path)
        except OSError as error:  # what trains from here on would be lost
            raise SystemExit(f"{self.path} cannot be written: {error}") from None

    def of(self, contestant: str, settings: Mapping[str, Any]) -> list[Run]:
        return [run for run in self.runs if run["contestant"] == contestant and alike(run["settings"], settings)]


def check_folder(folder: Path) -> None:
    """Make the folder of the records, and find out now whether it can be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is not writable")
    except OSError as error:
        raise CommandError(f"--records {folder} cannot be used: {error}") from None


def read(path: Path) -> dict[str, Any]:
    """The record of a task, from its file."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise CommandError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict) or not {*IDENTITY, "runs"} <= found.keys():
        raise CommandError(f"{path} is no record of a task")
    return found


def alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two runs had the same settings. An option that one does not name came later, or went: it is not asked."""
    groups = zip(one.values(), other.values(), strict=False)
    return len(one) == len(other) and all(a[key] == b[key] for a, b in groups for key in a.keys() & b.keys())


def loss_of(run: Run, higher_is_better: bool) -> float:
    """What the search makes as small as it can."""
    score = run["validation"]
    return math.inf if score is None else -score if higher_is_better else score


def finalists(runs: Sequence[Run], higher_is_better: bool) -> list[float]:
    """The best rates of seed 0, the best first; none if all diverged."""
    first = [run for run in runs if run["seed"] == 0 and run["validation"] is not None]
    return [run["lr"] for run in sorted(first, key=lambda run: loss_of(run, higher_is_better))[:FINALISTS]]


@dataclass(frozen=True)
class Choice:
    lr: float
    #: Over how many seeds the finalists were compared.
    seeds: int


def chosen(runs: Sequence[Run], higher_is_better: bool) -> Choice | None:
    """The finalist with the best mean over the seeds that all finalists have run; a run that diverged outweighs all."""
    losses = {
        lr: {run["seed"]: loss_of(run, higher_is_better) for run in runs if run["lr"] == lr}
        for lr in finalists(runs, higher_is_better)
    }
    if not losses:
        return None
    shared = set.intersection(*(set(found) for found in losses.values()))
    return Choice(min(losses, key=lambda lr: sum(losses[lr][seed] for seed in shared)), len(shared))


@dataclass(frozen=True)
class Result:
    """A contestant at its chosen rate."""

    contestant: str
    lr: float
    #: Whether a rate beyond it might have been better: it is the least or the largest that was tried.
    at_edge: bool
    #: How many rates were tried.
    trials: int
    #: How many seeds ran at the chosen rate, how many of these diverged, and how many chose it.
    seeds: int
    diverged: int
    chosen_by: int
    #: Means over the seeds that did not diverge.
    validation: float
    test: float
    #: Half of the difference between the best and the worst of them.
    spread: float
    #: A step's milliseconds while nothing else used the device; None: never measured so.
    ms: float | None
    state_bytes: int
    curves: Sequence[Curve]


def results(record: Mapping[str, Any]) -> list[Result]:
    """Every contestant's result, best first."""
    higher = record["higher_is_better"]
    found = []
    for contestant in dict.fromkeys(run["contestant"] for run in record["runs"]):
        runs = [run for run in record["runs"] if run["contestant"] == contestant]
        runs = [run for run in runs if alike(run["settings"], runs[-1]["settings"])]  # the latest settings of that name
        choice = chosen(runs, higher)
        if choice is None:
            continue
        seeds = [run for run in runs if run["lr"] == choice.lr]
        ended = [run for run in seeds if run["validation"] is not None]
        rates = sorted({run["lr"] for run in runs})
        tests = [run["test"] for run in ended]
        alone = [run["ms"] for run in runs if run["alone"]]
        found.append(
            Result(
                contestant=contestant,
                lr=choice.lr,
                at_edge=at_edge(choice.lr, rates),
                trials=len(rates),
                seeds=len(seeds),
                diverged=len(seeds) - len(ended),
                chosen_by=choice.seeds,
                validation=statistics.mean(run["validation"] for run in ended),
                test=statistics.mean(tests),
                spread=half_range(tests),
                ms=statistics.median(alone) if alone else None,
                state_bytes=ended[0]["state_bytes"],
                curves=[[(step, score) for step, score in run["curve"]] for run in ended],
            )
        )
    return sorted(found, key=lambda result: -result.test if higher else result.test)


def half_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def steps_to(curve: Curve, wanted: float, higher_is_better: bool) -> float | None:
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


def score_at(curve: Curve, step: float) -> float | None:
    """The score at a step, between two points of a curve; None before the first, and that of the end after it."""
    before: tuple[int, float] | None = None
    for at, score in curve:
        if step <= at:
            if before is None:
                return score if step == at else None
            return before[1] + (score - before[1]) * (step - before[0]) / (at - before[0])
        before = (at, score)
    return curve[-1][1]
