"""How an optimizer will treat each parameter, shown before the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from thalweg.explain import Explanation, GroupRow, Row
from thalweg.explain import explained as explained_by_shape
from thalweg.kernels import triton
from thalweg.kernels.cpu.compiled import source_of as native_source
from thalweg.settings import Setting
from thalweg.spaces import torch as xp

__all__ = ["Explanation", "GroupRow", "Row", "explained", "explained_group", "source_of"]

#: A count of steps is a tensor of float32 for each parameter.
COUNTER_BYTES = 4


def explained(name: str, p: Tensor, setting: Setting, lr: Any, *, is_hosted: bool = False, hint: str = "") -> Row:
    """The treatment of a parameter. A learning rate that is a tensor is not read: that would wait for it."""
    return explained_by_shape(
        name,
        tuple(p.shape),
        xp.dtype(p),
        setting,
        lr=lr,
        rms=rms_of(p),
        counter_bytes=COUNTER_BYTES,
        is_hosted=is_hosted,
        hint=hint,
    )


def explained_group(
    group: Mapping[str, Any], *, shown_only: bool, rule: str = "", beside: Sequence[str] = ()
) -> GroupRow:
    """A parameter group. shown_only: its lr is written by a scheduler for people to read, and not read by a step.

    rule: its name, where there are several. beside: why state stays beside parameters that should be on the host.
    """
    frozen = sum(not p.requires_grad for p in group["params"])
    notes = [f"offload_state has no effect: {reason}" for reason in beside]
    if shown_only:
        notes.append("a scheduler displays the step size as lr, and the rule computes it")
    elif group.get("lr_is_scale"):
        notes.append("lr multiplies the step size that the rule computes")
    if "lr_scale" in group:
        notes.append(f"lr_scale {group['lr_scale']} is for a scheduler to multiply lr by")
    name = group.get("name")
    return GroupRow(
        None if name is None else str(name),
        len(group["params"]) - frozen,
        frozen,
        shown_rate(group["lr"]),
        tuple(notes),
        rule,
    )


def source_of(setting: Setting, p: Tensor, *, has_lr: bool) -> str:
    """The source of the fused code that steps such a parameter, or why there is none."""
    shape, dtype = tuple(p.shape), xp.dtype(p)
    if p.device.type in triton.DEVICES and triton.reason_missing() is None:
        from thalweg.kernels.triton.explained import source_of

        return source_of(setting, shape, dtype, has_lr=has_lr)
    return native_source(setting, shape, dtype, has_lr=has_lr)


def shown_rate(lr: Any) -> Any:
    return "a tensor" if isinstance(lr, Tensor) else f"{lr:g}" if isinstance(lr, (int, float)) else lr


def rms_of(p: Tensor) -> float | None:
    """The root mean square of a parameter's 16-bit numbers, which rounding depends on; 1 where there are none yet."""
    if not p.numel() or p.element_size() > 2:
        return None
    return 1.0 if p.device.type == "meta" else float(p.detach().float().square().mean().sqrt())
