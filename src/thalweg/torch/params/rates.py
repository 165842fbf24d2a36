"""Learning rates: as a group shows them, and as a rule is given them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import Tensor

from thalweg.errors import OptionError
from thalweg.given import plain
from thalweg.rules import Rule

Rate: TypeAlias = float | Tensor | None


def rate_shown(rule: Rule, lr: Rate) -> dict[str, Any]:
    """A learning rate as a group shows it: always a number, or a tensor, that schedulers can multiply."""
    if not rule.lr_optional:
        return {"lr": lr if isinstance(lr, Tensor) else plain(lr)}
    if lr is None:
        return {"lr": 1.0, "lr_is_scale": True}
    return {"lr": lr if isinstance(lr, Tensor) else plain(lr), "lr_is_scale": False}


def check_rate(lr: Any) -> None:
    if callable(lr) and not isinstance(lr, Tensor):
        raise OptionError("lr cannot be a function in torch: use a scheduler of torch.optim.lr_scheduler")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise OptionError(f"lr must be a number or a tensor of one element, got shape {tuple(lr.shape)}")


def rate_given(group: Mapping[str, Any], *, shown_only: bool) -> tuple[Rate, float]:
    """What the rule is given as lr, and what multiplies the step size that it makes of it.

    shown_only: a scheduler writes the step size into the group for people to read.
    """
    lr = group["lr"]
    if lr is None:
        return None, 1.0
    if not group.get("lr_is_scale"):
        return lr.reshape(()) if isinstance(lr, Tensor) else lr, 1.0
    if shown_only:
        return None, 1.0
    if isinstance(lr, Tensor) and not lr.is_cpu:
        raise OptionError("lr multiplies the relative step of this group and must be a number, got a tensor")
    return None, float(lr)
