"""Runs on several cores at a time, one process each, with the results of one core."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from thalweg.race.contest import Race, race
from thalweg.race.run import Record, Result
from thalweg.race.sweep import Sweep, plan
from thalweg.race.task import Run

if TYPE_CHECKING:
    from thalweg.race.programme import Course

#: More would share caches and memory, and times would tell of that.
MOST = 4
#: Races of fewer steps are over before processes have started.
LEAST_STEPS = 4000
#: The race of a worker.
OWN: list[Race] = []


def count_workers(ready: Race) -> int:
    """How many processes a race of a small numpy task is worth: one for each core, if there is enough to do."""
    if sum(run.steps for run in ready.waiting) < LEAST_STEPS:
        return 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST)


class Workers:
    """Processes that each hold the race made by ``race(**arguments)``."""

    def __init__(self, count: int, arguments: Mapping[str, Any]) -> None:
        self.count = count
        self.pool = ProcessPoolExecutor(count, get_context("spawn"), start_worker, (dict(arguments),))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.pool.shutdown(wait=error is None, cancel_futures=True)

    def run(self, course: Course, records: Mapping[Run, Record]) -> Iterator[tuple[Run, Result]]:
        """The runs that a course waits for, each as soon as it is finished; the caller adds it to the records.

        Of each contestant one run at a time, in its order: whether a run is hopeless depends on those before it.
        """
        started: dict[Future[Result], Run] = {}
        while True:
            now = plan(course, records)
            busy = {run.contestant for run in started.values()}
            for run in sorted(now.waiting, key=lambda run: -self.seconds_left(run, now.waiting, records)):
                if run.contestant not in busy and len(started) < self.count:
                    busy.add(run.contestant)
                    started[self.pool.submit(execute, run, own_part(now.sweeps[run.contestant]))] = run
            if not started:
                return
            for future in wait(started, return_when=FIRST_COMPLETED).done:
                yield started.pop(future), future.result()

    @staticmethod
    def seconds_left(run: Run, waiting: Sequence[Run], records: Mapping[Run, Record]) -> float:
        """What the contestant of a run still has to do: the longest begins first."""
        known: list[float] = [r.result.seconds[-1] for r in records.values() if r.run.contestant == run.contestant]
        left = [each for each in waiting if each.contestant == run.contestant]
        return len(left) * max(known, default=1e9)


def own_part(sweep: Sweep) -> Sweep:
    """A sweep with the records that it asks for alone, to be sent."""
    sent = copy.copy(sweep)
    own = (sweep.run(lr) for lr in sweep.tried)
    sent.records = {run: sweep.records[run] for run in own if run in sweep.records}
    return sent


def start_worker(arguments: Mapping[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it decides
    OWN.append(race(**arguments))


def execute(run: Run, sweep: Sweep) -> Result:
    return OWN[0].execute(run, hopeless=sweep.hopeless)
