"""A small network and its training, by an optimizer of torch for a rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import thalweg.torch
from thalweg.check.problem import values as values_of
from thalweg.rules import RULES

#: Rules that step parameters of any shape as they come.
EVERY = pytest.mark.parametrize("rule", [name for name in RULES if name != "Muon"])


def make(rule: str, params: Any, engine: str = "reference", **options: Any) -> Any:
    rate = RULES[rule].typical_lr or RULES[rule].default_lr
    return getattr(thalweg.torch, rule)(params, **{"lr": rate, "engine": engine, **options})


def model(dtype: Any = torch.float64) -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3))
    return net.to(dtype)


def backward(net: Any, step: int = 0) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    net(x.to(next(net.parameters()).dtype)).square().mean().backward()


def train(net: Any, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(net, step)
        optimizer.step()


def values(net: Any) -> list[Any]:
    return values_of(list(net.parameters()))


def equal(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
