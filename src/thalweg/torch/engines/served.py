"""What native code and fused kernels ask of a tensor and of a rule before they step it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thalweg.arrays import is_number
from thalweg.rules import Annealed, Rule
from thalweg.settings import Setting

PLAIN = (Tensor, torch.nn.Parameter)


def reason_against_kind(rule: Rule, p: Tensor) -> str:
    """Why no code but torch's own can step a parameter, whatever its memory layout; "" if it can."""
    if (unknown := option_unknown(rule)) is not None:
        return f"{unknown} is a tensor, not a Python number"
    if type(p) not in PLAIN:
        return f"there is no fused kernel for a parameter of type {type(p).__name__}"
    return "its lazy negation bit is set (p.resolve_neg() makes a tensor without it)" if p.is_neg() else ""


def reason_against_layout(setting: Setting, p: Tensor, entries: Sequence[Tensor]) -> str:
    """Why a parameter and its state cannot be stepped as they lie in memory; "" if they can.

    In any order, as long as all that is as large as the parameter has the same.
    """
    if p.is_contiguous() and all(entry.is_contiguous() for entry in entries):
        return ""
    alike = is_dense(p) and all(e.shape == p.shape and e.stride() == p.stride() for e in entries)
    if alike and not setting.rule.stacked_axes and setting.handling.rounding == "nearest":
        return ""
    return f"it or its state is not contiguous in memory (its strides are {p.stride()})"


def option_unknown(rule: Rule) -> str | None:
    """An option whose value is a tensor."""
    for name, value in vars(rule).items():
        values = value if isinstance(value, tuple) else (value,)
        if not all(v is None or isinstance(v, (str, Annealed)) or is_number(v) or callable(v) for v in values):
            return name
    return None


def is_dense(p: Tensor) -> bool:
    """Whether the elements lie side by side in memory, each once, in whatever order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True
