"""Where and with what something was measured: what a record must carry so that it can be judged later."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
        "cpu": first_line("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def first_line(path: str, key: str = "") -> str:
    """The first line of a file of the system that begins so, without its beginning."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(key).lstrip("\t :") for line in lines if line.startswith(key)), "")
