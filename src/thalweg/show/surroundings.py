"""Where and with what something was measured: what a record must carry so that it can be judged later."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Python's version and those of the packages that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
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
