"""The search for learning rates: a grid, halved on the way, widened where the best lies at its edge.

All of it follows from what was asked and the records, so that a race can be stopped, continued and repeated. Seed 0
searches: each optimizer tries its grid from the middle outwards, and a run that is hopeless at a rung stops there. As
long as the best rate of anyone lies at an edge, everyone gets one more trial, up to ``Search.widen`` times: beyond the
edge, or between the best rate and its better neighbour. The best rates then run with the other seeds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from thalweg.race.run import Record, loss_at, measuring_times, or_infinite
from thalweg.race.task import Run

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


@dataclass(frozen=True)
class Search:
    """What is searched: by contestant, its run from seed 0 at the first rate of its grid, and that grid."""

    runs: Mapping[str, Run]
    grids: Mapping[str, Sequence[float]]
    #: How many seeds the best rates run with.
    seeds: int
    #: How many rates may be added to everyone's grid.
    widen: int
    #: Nothing is stopped, and every rate runs with every seed.
    full: bool
    #: Whose rates were given, and stay as they are.
    fixed: Collection[str]


@dataclass(frozen=True)
class Plan:
    """The runs of a race as far as they are decided, in order."""

    runs: Sequence[Run]
    #: Those that are not recorded yet, or have to be finished.
    waiting: Sequence[Run]
    #: How many more there will be, if no grid has to be widened.
    later: int
    #: By contestant.
    sweeps: Mapping[str, Sweep]


class Sweep:
    """The trials of one contestant."""

    def __init__(self, name: str, search: Search, records: Mapping[Run, Record]) -> None:
        self.first, self.grid, self.full = search.runs[name], sorted(search.grids[name]), search.full
        self.seeds, self.records = search.seeds, records
        self.searches = name not in search.fixed and len(self.grid) > 1
        self.tried = sorted(self.grid, key=lambda lr: abs(2 * self.grid.index(lr) + 1 - len(self.grid)))

    def run(self, lr: float, seed: int = 0) -> Run:
        return replace(self.first, lr=lr, seed=seed)

    def count_kept(self, share: float) -> int:
        return len(self.tried) if self.full else max(FEWEST, math.ceil(share * len(self.grid)))

    def done(self, run: Run) -> bool:
        record = self.records.get(run)
        return record is not None and not (self.full and record.stopped)

    @property
    def over(self) -> bool:
        return all(self.done(self.run(lr)) for lr in self.tried)

    def standing(self, lr: float) -> tuple[bool, int, float]:
        """Less is better: whether a rate diverged, how far it got, and its loss there."""
        result = self.records[self.run(lr)].result
        return result.loss[-1] is None, -result.step[-1], or_infinite(result.loss[-1])

    @property
    def best(self) -> float:
        return min(self.tried, key=self.standing)

    @property
    def at_edge(self) -> bool:
        """Whether the best rate may lie outside of those tried."""
        return self.best in (min(self.tried), max(self.tried)) or self.standing(self.best)[0]

    def next_rate(self) -> float:
        """Beyond the edge, downwards if everything diverged; or between the best and its better neighbour."""
        rates, best = sorted(self.tried), self.best
        place = rates.index(best)
        if self.standing(best)[0] or place == 0:
            return to_digits(rates[0] / max(rates[1] / rates[0], BEYOND))
        if place == len(rates) - 1:
            return to_digits(best * max(best / rates[-2], BEYOND))
        neighbours = sorted((rates[place - 1], rates[place + 1]), key=self.standing)
        between = [to_digits(math.sqrt(best * other)) for other in neighbours]
        return next((lr for lr in between if lr not in rates), between[0])

    def repeats(self, rates: Sequence[float]) -> list[Run]:
        return [self.run(lr, seed) for lr in rates for seed in range(1, self.seeds)]

    def hopeless(self, run: Run, step: int, loss: float | None) -> bool:
        """Whether a run with this loss at this step stops there: enough others have been better."""
        share = rungs(run.steps).get(step)
        if share is None or self.full or run.seed or loss is None:  # what diverged is over anyway
            return False
        others = [self.records[self.run(lr)].result for lr in self.tried if lr != run.lr and self.done(self.run(lr))]
        better = sum(or_infinite(loss_at(other, step)) < loss for other in others)
        return better >= self.count_kept(share)


def to_digits(lr: float) -> float:
    return float(f"{lr:.3g}")


def rungs(steps: int) -> dict[int, float]:
    """The steps at which a run may stop, and the share of the grid that goes on there."""
    times = measuring_times(steps)
    return {times[round(at * (len(times) - 1))]: share for at, share in RUNGS} if steps >= LEAST_STEPS else {}


def plan(search: Search, records: Mapping[Run, Record]) -> Plan:
    """The search of everyone, then the repetitions of those rates that are known to be repeated."""
    sweeps = {name: Sweep(name, search, records) for name in search.runs}
    searching = [sweep for sweep in sweeps.values() if sweep.searches]
    for _ in range(search.widen):
        if not all(sweep.over for sweep in sweeps.values()) or not any(sweep.at_edge for sweep in searching):
            break
        for sweep in searching:
            sweep.tried.append(sweep.next_rate())
    over = all(sweep.over for sweep in sweeps.values())
    runs, later = [sweep.run(lr) for sweep in sweeps.values() for lr in sweep.tried], 0
    for sweep in sweeps.values():
        repeated = sweep.count_kept(REPEATED)
        if over:
            runs += sweep.repeats(sorted(sweep.tried, key=sweep.standing)[:repeated])
        elif len(sweep.tried) <= repeated:
            runs += sweep.repeats(sweep.tried)
        else:
            later += repeated * (sweep.seeds - 1)
    return Plan(runs, [run for run in runs if not sweeps[run.contestant].done(run)], later, sweeps)
