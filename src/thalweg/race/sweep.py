"""The search for learning rates: a grid, halved on the way, widened where the best lies at its edge.

All of it follows from what was asked and the records, so that a race can be stopped, continued and repeated. Seed 0
searches: each optimizer tries its grid from the middle outwards, and a run that is hopeless at a rung stops there. As
long as the best rate of anyone lies at an edge, everyone gets one more trial, as often as ``widen`` says: beyond the
edge, or between the best rate and its better neighbour. The best rates then run with the other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from thalweg.race.contestants import Contestant
from thalweg.race.run import Record, Run, measuring_times, or_infinite

#: At this share of its steps a run stops, if this share of the grid has already done better there.
RUNGS = ((1 / 4, 3 / 4), (1 / 2, 1 / 2))
#: The share of the grid that runs with the other seeds.
REPEATED = 1 / 4
#: So many rates are never too many to go on with.
FEWEST = 2
#: Runs of fewer steps are not stopped.
LEAST_STEPS = 8
#: A rate beyond the edge is at least so many times the one there.
BEYOND = 2.0


@dataclass
class Sweep:
    """The trials of one contestant."""

    contestant: Contestant
    #: From seed 0 at the first of the contestant's rates.
    first: Run
    #: Everyone's.
    records: Mapping[Run, Record]
    #: How many seeds the best rates run with.
    seeds: int
    #: Nothing is stopped, and every rate runs with every seed.
    full: bool
    #: The rates in the order in which they are tried: the grid, and what is added to it.
    tried: list[float] = field(init=False)

    def __post_init__(self) -> None:
        grid = sorted(self.contestant.rates)
        self.tried = sorted(grid, key=lambda lr: abs(2 * grid.index(lr) + 1 - len(grid)))

    def make_run(self, lr: float, seed: int = 0) -> Run:
        return replace(self.first, lr=lr, seed=seed)

    def count_best(self, share: float) -> int:
        """How many rates this share of the grid is: those that go on."""
        return len(self.tried) if self.full else max(FEWEST, math.ceil(share * len(self.contestant.rates)))

    def is_done(self, run: Run) -> bool:
        record = self.records.get(run)
        return record is not None and not (self.full and record.stopped)

    @property
    def is_over(self) -> bool:
        return all(self.is_done(self.make_run(lr)) for lr in self.tried)

    def rank(self, lr: float) -> tuple[bool, int, float]:
        """What rates are compared by, and less is better: whether it diverged, minus its steps, its loss there."""
        result = self.records[self.make_run(lr)].result
        return result.loss[-1] is None, -result.step[-1], or_infinite(result.loss[-1])

    @property
    def best(self) -> float:
        return min(self.tried, key=self.rank)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate may lie outside of those tried."""
        return self.best in (min(self.tried), max(self.tried)) or self.rank(self.best)[0]

    def next_rate(self) -> float:
        """Beyond the edge, downwards if everything diverged; or between the best and its better neighbour."""
        rates, best = sorted(self.tried), self.best
        place = rates.index(best)
        if self.rank(best)[0] or place == 0:
            return round_rate(rates[0] / max(rates[1] / rates[0], BEYOND))
        if place == len(rates) - 1:
            return round_rate(best * max(best / rates[-2], BEYOND))
        neighbours = sorted((rates[place - 1], rates[place + 1]), key=self.rank)
        between = [round_rate(math.sqrt(best * neighbour)) for neighbour in neighbours]
        return next((lr for lr in between if lr not in rates), between[0])

    @property
    def repeated(self) -> list[float]:
        """The rates that run with the other seeds, once the search is over."""
        return sorted(self.tried, key=self.rank)[: self.count_best(REPEATED)]

    def is_hopeless(self, run: Run, step: int, loss: float | None) -> bool:
        """Whether a run with this loss at this step stops there, because enough rates had less loss at that step."""
        share = rungs(run.steps).get(step)
        if share is None or self.full or run.seed or loss is None:  # what diverged is over anyway
            return False
        others = [self.make_run(lr) for lr in self.tried if lr != run.lr]
        results = [self.records[other].result for other in others if self.is_done(other)]
        losses = [dict(zip(result.step, result.loss, strict=True)).get(step) for result in results]
        return sum(or_infinite(other) < loss for other in losses) >= self.count_best(share)


def round_rate(lr: float) -> float:
    return float(f"{lr:.3g}")


def rungs(steps: int) -> dict[int, float]:
    """The steps at which a run may stop, and the share of the grid that goes on there."""
    times = measuring_times(steps)
    return {times[round(at * (len(times) - 1))]: share for at, share in RUNGS} if steps >= LEAST_STEPS else {}


def widen(sweeps: Collection[Sweep], most: int) -> None:
    """Add a rate for everyone who searches, as long as the best of any is at an edge, and up to ``most`` of them."""
    searching = [sweep for sweep in sweeps if sweep.contestant.is_searched]
    while all(sweep.is_over for sweep in sweeps) and any(sweep.at_edge for sweep in searching):
        if any(len(sweep.tried) - len(sweep.contestant.rates) >= most for sweep in searching):
            break
        for sweep in searching:
            sweep.tried.append(sweep.next_rate())


def plan(sweeps: Collection[Sweep], beyond: int) -> list[Run]:
    """The search of everyone, and once that is over the repetitions at the best rates, in order."""
    widen(sweeps, beyond)
    runs = [sweep.make_run(lr) for sweep in sweeps for lr in sweep.tried]
    if all(sweep.is_over for sweep in sweeps):
        runs += [
            sweep.make_run(lr, seed) for sweep in sweeps for lr in sweep.repeated for seed in range(1, sweep.seeds)
        ]
    return runs
