"""What has to be settled for this process before frameworks are loaded: they look only once."""

from __future__ import annotations

import os

from thalweg.errors import CommandError


def prepare(device: str, threads: int | None) -> None:
    """Leave everyone as many cores, and let JAX and torch share a GPU."""
    # JAX would take most of a GPU's memory at once, and nothing would be left for torch
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if threads is not None:
        keep_to_cores(threads)


def keep_to_cores(count: int) -> None:
    """Cores where the system lets us choose, and else the number of threads that libraries start."""
    for library in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_NUM_THREADS"):
        os.environ[library] = str(count)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if count > len(cores):
            raise CommandError(f"--threads {count} is more than the {len(cores)} cores that this process may run on")
        os.sched_setaffinity(0, cores[:count])
