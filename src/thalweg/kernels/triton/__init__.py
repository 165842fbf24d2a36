"""Fused kernels for GPUs, in Triton: many tensors a launch, in passes that are separated by reductions.

Importing this loads no Triton; the modules beside it do.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings

from thalweg.errors import FallbackWarning
from thalweg.kernels.by_hand import Reads
from thalweg.rules import Kron

#: Devices whose tensors are stepped here. (Triton's interpreter takes those of the CPU: so tests need no GPU.)
DEVICES = {"cuda"}
#: The options that kernels written by hand read, by themselves or through the rule's own methods. Those of all other
#: rules are made from the rule, and read what it reads.
READS: Reads = {
    Kron: (
        "precond_lr momentum momentum_mode weight_decay weight_decay_mode normalize_grads eps clip clip_mode geometry "
        "stacked_axes whiten precond_update_probability max_size_dense max_skew block_size merge init_scale damping "
        "relative_damping damping_mode lipschitz_beta precond_precision"
    ),
}


@functools.cache
def reason_missing() -> str | None:
    """Why there are no kernels for GPUs, or None if there are."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(
        f"thalweg's fused GPU kernels are not available ({reason}): steps on the GPU take many times as long. "
        "Triton comes with PyTorch's builds for GPUs on Linux; elsewhere try pip install triton",
        FallbackWarning,
        stacklevel=2,
    )
