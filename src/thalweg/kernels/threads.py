"""How many threads native code uses: what was set, or what the machine or the framework has."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from thalweg.errors import OptionError

_chosen: int | None = None
#: More threads than any machine has cores for would only wait for one another.
MOST = 1024


def set_num_threads(n: int | None) -> None:
    """Let native code use so many threads; None: as many as torch uses, or the machine has.

    Results do not depend on it: they have the same bits for any number of threads.
    """
    global _chosen
    if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
        raise OptionError(f"the number of threads must be a whole number >= 1 or None, got {n!r}")
    _chosen = n


def num_threads(otherwise: Callable[[], int]) -> int:
    """What was set, here or by THALWEG_NUM_THREADS, or else what ``otherwise`` says."""
    return count_threads(otherwise)()


def count_threads(otherwise: Callable[[], int]) -> Callable[[], int]:
    """A function that returns this number. The environment is read now, once, since reading it takes long."""
    asked = of_environment("THALWEG_NUM_THREADS")
    return lambda: min(MOST, _chosen or asked or otherwise())


def of_environment(variable: str) -> int | None:
    """A number of threads in the environment; what is no such number is ignored, as OpenMP does."""
    text = os.environ.get(variable)
    if not text:
        return None
    first = text.split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def of_machine() -> int:
    """As many as this process may run on, by OMP_NUM_THREADS, its affinity and its share of the processors."""
    if (wanted := of_environment("OMP_NUM_THREADS")) is not None:
        return wanted
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, share_of_container() or cores))


def share_of_container() -> int | None:
    """The number of processors that a container is limited to, if it is."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, round(int(quota) / int(period)))
    except (OSError, ValueError):  # no such limit, or "max"
        return None
