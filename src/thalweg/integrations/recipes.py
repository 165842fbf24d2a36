"""Mixtures by name, and the learning rates of their two rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

from thalweg import torch as front_end

#: Makes an optimizer of a model, with the arguments of ``thalweg.torch.kron_adamw``.
Recipe: TypeAlias = Callable[..., front_end.Optimizer]
RECIPES: Mapping[str, Recipe] = {"kron_adamw": front_end.kron_adamw, "muon_adamw": front_end.muon_adamw}


def rates(recipe: Recipe, lr: float | None) -> dict[str, float]:
    """The learning rates of a mixture whose first is given, or by default: that of AdamW is to it as by default."""
    usual = {name: p.default for name, p in inspect.signature(recipe).parameters.items()}
    factor = 1.0 if lr is None else lr / usual["lr"]
    return {name: usual[name] * factor for name in ("lr", "adamw_lr")}
