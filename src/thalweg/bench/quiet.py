"""Rounds that other processes leave alone.

Other work on the machine does not hit all alike: an optimizer whose threads meet at barriers waits for the thread that
lost its core, and takes ten times as long where others take twice. So rounds are chosen by what other processes took of
the cores meanwhile, and by nothing else. Linux reports that; elsewhere every round counts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

#: A round is quiet if other processes take at most this share of the cores.
QUIET = 0.05
#: At most so many times the rounds asked for; then the least disturbed ones count.
PATIENCE = 3
#: Seconds to look around before a round, and to wait at most for others to be done.
LOOK, WAIT = 0.2, 5.0


@dataclass(frozen=True)
class Round(Generic[T]):
    result: T
    #: The share of all cores that other processes took meanwhile.
    others: float


def run_undisturbed(
    run: Callable[[], T],
    count: int,
    *,
    wait: float = WAIT,
    on_round: Callable[[int, float], object] = lambda done, others: None,
) -> tuple[list[Round[T]], list[Round[T]]]:
    """The rounds that count, as many as asked for and in their order; and those left out.

    ``on_round`` is called with how many rounds were quiet so far, and how disturbed the last one was.
    """
    rounds: list[Round[T]] = []
    quiet = 0
    while quiet < count and len(rounds) < PATIENCE * count:
        wait_for_quiet(wait)
        rounds.append(watch_round(run))
        quiet += rounds[-1].others <= QUIET
        on_round(quiet, rounds[-1].others)
    least = sorted(range(len(rounds)), key=lambda i: rounds[i].others)[:count]
    return [rounds[i] for i in sorted(least)], [rounds[i] for i in range(len(rounds)) if i not in least]


def watch_round(run: Callable[[], T]) -> Round[T]:
    begin, busy = time.perf_counter(), count_busy_elsewhere()
    result = run()
    cores = (time.perf_counter() - begin) * (os.cpu_count() or 1)
    return Round(result, max(0.0, count_busy_elsewhere() - busy) / cores)


def wait_for_quiet(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and watch_round(lambda: time.sleep(LOOK)).others > QUIET:
        pass


def count_busy_elsewhere() -> float:
    """Seconds of all cores that went to others than this process, other machines on the same cores included."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    except OSError:
        return 0.0
    user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, first.split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK") - time.process_time()
