"""Where and with what something runs: a device by its name, and what a record says of the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError

CPUINFO = Path("/proc/cpuinfo")


class Device:
    """A device by its name: cpu, cuda, cuda:1. torch is imported only for others than the CPU, and for training."""

    def __init__(self, name: str = "cpu") -> None:
        self.name = name
        self.cuda: Any = None
        if name.partition(":")[0] == "cpu":
            return
        if importlib.util.find_spec("torch") is None:
            raise CommandError(f"--device {name} needs PyTorch, which is not installed: pip install torch")
        import torch

        try:
            kind = torch.device(name).type
        except RuntimeError:
            raise CommandError(f"there is no device {name!r}: try cpu or cuda") from None
        if kind == "cuda":
            self.cuda = torch.cuda
            if not self.cuda.is_available():
                raise CommandError(f"there is no device {name!r}: PyTorch can use no GPU here; try cpu")

    def describe(self) -> str:
        """Name the processor or the GPU."""
        return cpu_name() if self.cuda is None else str(self.cuda.get_device_name(self.name))

    def wait(self) -> None:
        """Return when everything that was queued is done."""
        if self.cuda is not None:
            self.cuda.synchronize(self.name)

    @contextmanager
    def seed_torch(self, seed: int, step: int) -> Iterator[None]:
        """Random numbers of torch that depend on seed and step; afterwards those of the caller go on as before."""
        import torch

        with torch.random.fork_rng(devices=[] if self.cuda is None else [self.name]):
            torch.manual_seed(seed * 1_000_003 + step)
            yield

    def move(self, batch: Any) -> Any:
        """A batch on the device: a tensor, or tuples, lists and dicts of them."""
        if isinstance(batch, (tuple, list)):
            parts = [self.move(part) for part in batch]
            # named tuples want them singly
            return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
        if isinstance(batch, dict):
            return {key: self.move(part) for key, part in batch.items()}
        return batch.to(self.name) if hasattr(batch, "to") else batch


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages that are installed, without importing them."""
    installed = {"python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def machine() -> dict[str, Any]:
    """The processor, its cores and the system; nothing that names the machine or its owner."""
    system = f"{platform.system()} {platform.machine()}"
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "system": system}


def cpu_name() -> str:
    """The model of the processor where Linux tells it; else the best that Python knows."""
    with contextlib.suppress(OSError):
        for line in CPUINFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
