"""Fused kernels for GPUs, in Triton: many tensors a launch, in passes that are separated by reductions.

Importing this loads no Triton; the modules beside it do.
"""

from __future__ import annotations

import functools
import importlib.util

from thalweg.errors import FallbackWarning, warn

#: Devices whose tensors are stepped here. (Triton's interpreter takes those of the CPU: so tests need no GPU.)
DEVICES = {"cuda"}


@functools.cache
def is_here() -> bool:
    """Whether there are kernels for GPUs."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def warn_once(reason: str) -> None:
    warn(
        f"thalweg's fused GPU kernels are not available ({reason}): steps on the GPU take many times as long. "
        "Triton comes with PyTorch's builds for GPUs on Linux; elsewhere try pip install triton",
        FallbackWarning,
    )
