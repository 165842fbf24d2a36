"""CPUs and GPUs as commands use them: their names, their clocks and their memory."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.show.surroundings import machine

#: Bytes that are assumed to be free where the system does not tell.
LITTLE_MEMORY = 8 * 2**30
#: Clock cycles of a GPU in a second, rounded up.
CYCLES = 2e9


class Device:
    """A device by its name: cpu, cuda, cuda:1. torch is imported only for others than the CPU."""

    def __init__(self, name: str = "cpu") -> None:
        self.name, self.kind = name, name.partition(":")[0]
        self.cuda: Any = None
        if self.kind == "cpu":
            return
        if importlib.util.find_spec("torch") is None:
            raise CommandError(f"--device {name} needs PyTorch, which is not installed: pip install torch")
        import torch

        try:
            torch.device(name)
        except RuntimeError:
            raise CommandError(f"there is no device {name!r}: try cpu or cuda") from None
        if self.kind == "cuda":
            self.cuda = torch.cuda
            if not self.cuda.is_available():
                raise CommandError("there is no GPU here that PyTorch can use: try --device cpu")

    def describe(self) -> str:
        """Name the processor or the GPU."""
        return f"{machine()['cpu']}, {count_threads()} threads" if self.cuda is None else self.cuda.get_device_name()

    def wait(self) -> None:
        """Return when everything that was queued is done."""
        if self.cuda is not None:
            self.cuda.synchronize()

    def time(self, action: Callable[[], object]) -> float:
        """Seconds until everything that the action asks for is done."""
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - start

    def time_host(self, action: Callable[[], object]) -> float:
        """Seconds until the action returns, begun with an empty queue."""
        self.wait()
        start = time.perf_counter()
        action()
        took = time.perf_counter() - start
        self.wait()
        return took

    def time_queue(self, action: Callable[[], object], hold: float) -> float:
        """Seconds that a GPU takes for what an action queues in torch.

        The queue is held for ``hold`` seconds first: a host that has queued everything by then does not count.
        """
        begin, end = (self.cuda.Event(enable_timing=True) for _ in range(2))
        self.wait()
        self.cuda._sleep(int(hold * CYCLES))
        begin.record()
        action()
        end.record()
        self.wait()
        return float(begin.elapsed_time(end)) / 1e3

    def count_free_bytes(self) -> int:
        """Memory that nobody uses."""
        if self.cuda is not None:
            return int(self.cuda.mem_get_info()[0])
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return LITTLE_MEMORY
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), LITTLE_MEMORY)

    def release_memory(self) -> None:
        """Give memory that is no longer used back to the system."""
        gc.collect()
        if self.cuda is not None:
            self.cuda.empty_cache()
        elif sys.platform == "linux":
            with contextlib.suppress(AttributeError):  # an allocator that has no such function
                ctypes.CDLL(None).malloc_trim(0)

    def find_in_jax(self) -> Any:
        """The same device as JAX calls it."""
        import jax

        try:
            return jax.devices("cpu" if self.cuda is None else "gpu")[0]
        except RuntimeError as error:
            raise RuntimeError("JAX sees no GPU here") from error


def count_threads() -> int:
    """How many threads torch takes, or, without torch, how many cores this process has."""
    if importlib.util.find_spec("torch") is None:
        return num_threads(of_machine)
    import torch

    return torch.get_num_threads()


def prepare_process(device: str, threads: int | None = None) -> None:
    """Set what frameworks read once, when they are loaded: where JAX runs, and how many cores everyone has."""
    # JAX would take most of a GPU's memory at once, and leave none to torch
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if device == "cpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if threads is None:
        return
    for library in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "THALWEG_NUM_THREADS"):
        os.environ[library] = str(threads)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if threads > len(cores):
            raise CommandError(f"--threads {threads} is more than the {len(cores)} cores that this process may run on")
        os.sched_setaffinity(0, cores[:threads])
