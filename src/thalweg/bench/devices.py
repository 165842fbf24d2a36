"""Where steps run: what a CPU and a GPU do differently when they are measured."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from thalweg.errors import CommandError
from thalweg.kernels.threads import num_threads, of_machine
from thalweg.show.surroundings import machine

NAMES = ("cpu", "cuda")
#: Where the system does not tell what is free.
LITTLE_MEMORY = 8 * 2**30


class Device(Protocol):
    """All that measuring asks of a device."""

    @property
    def name(self) -> str: ...

    @property
    def calls(self) -> int:
        """How often a step is called in one measurement."""

    @property
    def rest(self) -> float:
        """Seconds of rest before a measurement."""

    def about(self) -> str:
        """What it is, for people."""

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds until everything that the action asks for is done."""

    def free_bytes(self) -> int:
        """Memory that nobody uses."""

    def give_back(self) -> None:
        """Let the system have the memory that is no longer used."""

    def jax_device(self) -> Any:
        """The same device as JAX calls it."""


class Cpu:
    """The cores that this process may run on."""

    name = "cpu"
    calls = 1
    #: Threads of OpenMP were seen to spin for 3 to 7 ms before they slept.
    rest = 0.02

    def about(self) -> str:
        return f"{machine()['cpu']}, {threads()} threads"

    def timed(self, action: Callable[[], object]) -> float:
        start = time.perf_counter()
        action()
        return time.perf_counter() - start

    def free_bytes(self) -> int:
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return LITTLE_MEMORY
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), LITTLE_MEMORY)

    def give_back(self) -> None:
        gc.collect()
        if sys.platform == "linux":
            with contextlib.suppress(AttributeError):  # an allocator that cannot be asked to
                ctypes.CDLL(None).malloc_trim(0)

    def jax_device(self) -> Any:
        import jax

        return jax.devices("cpu")[0]


class Cuda:
    """The first GPU of torch. What it is asked to do runs later, so that times are taken when it is idle again."""

    name = "cuda"
    #: In training, the host runs ahead of the GPU: one call alone would be measured with all its latency. After a rest
    #: clocks would be low.
    calls = 10
    rest = 0.0

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise CommandError("--device cuda needs PyTorch, which is not installed: pip install torch")
        import torch

        if not torch.cuda.is_available():
            raise CommandError("there is no GPU here that PyTorch can use: --device cpu is what can be measured")
        self._cuda = torch.cuda

    def about(self) -> str:
        return self._cuda.get_device_name()

    def timed(self, action: Callable[[], object]) -> float:
        self._cuda.synchronize()
        start = time.perf_counter()
        action()
        self._cuda.synchronize()
        return time.perf_counter() - start

    def free_bytes(self) -> int:
        return int(self._cuda.mem_get_info()[0])

    def give_back(self) -> None:
        gc.collect()
        self._cuda.empty_cache()

    def jax_device(self) -> Any:
        import jax

        try:
            return jax.devices("gpu")[0]
        except RuntimeError as error:
            raise RuntimeError("JAX sees no GPU here") from error


def device_called(name: str) -> Device:
    """``cpu`` or ``cuda``, if it is there."""
    if name not in NAMES:
        raise CommandError(f"there is no device {name!r}: there are {', '.join(NAMES)}")
    return Cpu() if name == "cpu" else Cuda()


def threads() -> int:
    """How many threads torch takes, or as many as this process has cores."""
    if importlib.util.find_spec("torch") is not None:
        import torch

        return torch.get_num_threads()
    return num_threads(of_machine)
