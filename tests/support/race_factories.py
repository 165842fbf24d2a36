"""Optimizers of torch by import path, right and wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class Replacing(torch.optim.SGD):
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.data = p.data - self.param_groups[0]["lr"] * p.grad


def groups(params: Sequence[Any], lr: float, factor: float = 0.5) -> Any:
    return torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": lr * factor}], lr=lr)


def tensor(params: Any, lr: float) -> Any:
    return torch.optim.Adam(params, lr=torch.tensor(lr), foreach=False)


def nothing(params: Any, lr: float) -> Any:
    return 3


def forgetful(params: Any, lr: float) -> Any:
    made = torch.optim.SGD(params, lr=lr)
    del made.param_groups[0]["lr"]
    return made
