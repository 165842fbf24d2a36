"""Where and with what something runs: CPUs and GPUs, their clocks and memory, and what a record says of them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.kernels.threads import num_threads, of_machine

#: As people call them; systems differ in how they spell them.
ARCHITECTURES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64"}
CPUINFO = "/proc/cpuinfo"
#: What Linux says of an ARM core, in place of a name: who designed it, and what.
ARM_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd8e"): "Neoverse-N3",
    ("0x46", "0x001"): "A64FX",
    ("0x48", "0xd01"): "Kunpeng-920",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
#: Bytes that are assumed to be free where the system does not tell.
LITTLE_MEMORY = 8 * 2**30
#: Clock cycles of a GPU in a second, rounded up.
CYCLES = 2e9


class Device:
    """A device by its name: cpu, cuda, cuda:1. torch is imported only for others than the CPU, and for training."""

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
                raise CommandError(f"there is no device {name!r}: PyTorch can use no GPU here; try cpu")

    def describe(self) -> str:
        """Name the processor or the GPU."""
        if self.cuda is None:
            return f"{machine()['cpu']}, {count_threads()} threads"
        return str(self.cuda.get_device_name(self.name))

    def wait(self) -> None:
        """Return when everything that was queued is done."""
        if self.cuda is not None:
            self.cuda.synchronize(self.name)

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
        """Free memory."""
        if self.cuda is not None:
            return int(self.cuda.mem_get_info(self.name)[0])
        available = lines_of("/proc/meminfo", "MemAvailable")
        return int(available[0].split()[0]) * 1024 if available else LITTLE_MEMORY

    def release_memory(self) -> None:
        """Give memory that is no longer used back to the system."""
        gc.collect()
        if self.cuda is not None:
            self.cuda.empty_cache()
        elif sys.platform == "linux":
            with contextlib.suppress(AttributeError):  # an allocator that has no such function
                ctypes.CDLL(None).malloc_trim(0)

    def count_bytes_in_use(self) -> int:
        """Memory of a GPU that torch has given out; on a CPU 0."""
        if self.cuda is None:
            return 0
        gc.collect()
        return int(self.cuda.memory_allocated(self.name))

    def forget_peak(self) -> None:
        if self.cuda is not None:
            self.cuda.reset_peak_memory_stats(self.name)

    def peak_bytes(self) -> int | None:
        """The most memory in use since ``forget_peak``; None where it is not counted."""
        return None if self.cuda is None else int(self.cuda.max_memory_allocated(self.name))

    @contextmanager
    def seed_torch(self, seed: int, step: int) -> Iterator[None]:
        """Random numbers of torch that depend on seed and step; afterwards those of the caller go on as before."""
        import torch

        with torch.random.fork_rng(devices=[] if self.cuda is None else [self.name]):
            torch.manual_seed(seed * 1_000_003 + step)
            yield

    def mixed_precision(self) -> AbstractContextManager[Any]:
        """Products in bfloat16 on a GPU."""
        import torch

        return nullcontext() if self.cuda is None else torch.autocast(self.kind, torch.bfloat16)

    def move(self, batch: Any) -> Any:
        """A batch on the device: a tensor, or tuples, lists and dicts of them."""
        if isinstance(batch, (tuple, list)):
            parts = [self.move(part) for part in batch]
            # named tuples want them singly
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        if isinstance(batch, dict):
            return {key: self.move(part) for key, part in batch.items()}
        return batch.to(self.name) if hasattr(batch, "to") else batch

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


# ---- what a record says


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def machine() -> dict[str, Any]:
    """The processor, its cores and the system; nothing that names the machine or its owner."""
    return {
        "cpu": cpu_name(),
        "architecture": architecture(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def architecture() -> str:
    """``x86-64``, ``arm64``, or what else the system says."""
    return ARCHITECTURES.get(platform.machine().lower(), platform.machine().lower())


def cpu_name() -> str:
    """The model of the processor, or the best that the system tells of it."""
    named = lines_of(CPUINFO, "model name")[:1] or arm_cores()
    return " + ".join(named) or mac_name() or platform.processor() or architecture()


def arm_cores() -> list[str]:
    """The kinds of cores by their names, where Linux tells who designed them; there may be large and small ones."""
    kinds = zip(lines_of(CPUINFO, "CPU implementer"), lines_of(CPUINFO, "CPU part"), strict=False)
    return [ARM_CORES.get(kind, "ARM core {1} by {0}".format(*kind)) for kind in dict.fromkeys(kinds)]


def mac_name() -> str:
    if sys.platform != "darwin":
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(asked, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    return ""


def lines_of(path: str, key: str) -> list[str]:
    """The lines of a file of the system that begin so, without their beginning; none if there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [line.removeprefix(key).strip("\t :") for line in lines if line.startswith(key)]
