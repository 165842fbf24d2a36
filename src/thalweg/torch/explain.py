"""What an optimizer will do with each parameter, told before it does anything."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from thalweg.explain import Explanation, Row
from thalweg.explain import explained as explained_by_shape
from thalweg.settings import Setting
from thalweg.spaces import torch as xp

__all__ = ["Explanation", "Row", "explained"]

#: A count of steps is a tensor of float32 for each parameter.
COUNTER_BYTES = 4


def explained(name: str, p: Tensor, setting: Setting, lr: Any) -> Row:
    """What holds for a parameter. Learning rates that are tensors are not waited for."""
    return explained_by_shape(
        name, tuple(p.shape), xp.dtype(p), setting, lr=lr, rms=rms_of(p), counter_bytes=COUNTER_BYTES
    )


def rms_of(p: Tensor) -> float | None:
    """The root mean square of a parameter's 16-bit numbers, which rounding depends on; 1 where there are none yet."""
    if not p.numel() or p.element_size() > 2:
        return None
    return 1.0 if p.device.type == "meta" else float(p.detach().float().square().mean().sqrt())
