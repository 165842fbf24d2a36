"""A small network and its training, by an optimizer of torch for a row of the table of rules."""

from __future__ import annotations

from typing import Any

import pytest
from cases import CASES, Case

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import values as values_of  # noqa: E402

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def make(case: Case, params: Any, engine: str = "reference", **options: Any) -> Any:
    return getattr(thalweg.torch, case.name)(params, **{"lr": case.lr, "engine": engine, **options})


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
