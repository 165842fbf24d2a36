"""Engines of torch over the same tensors, for tests that step by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from agree import assert_alike, draw, draw_gradients
from side_by_side import RATES, UNITS_OF_STEPS

import thalweg.torch
from thalweg.torch.exchange import to_numpy, to_tensor

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40), "conv": (9, 7, 3, 2)}
FULL: dict[str, dict[str, Any]] = {"LARS": {}, "LAMB": {}, "Adafactor": dict(min_dim_size_to_factor=2, momentum=0.9)}


def make(rule: str, params: Any, engine: str = "fused", **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(params, **{"lr": RATES.get(rule, 0.01), **options}, engine=engine)


def parameters(dtype: str = "float32", shapes: Any = SHAPES, seed: int = 0) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(to_tensor(x))) for name, x in draw(shapes, dtype, seed).items()]


def gradients(steps: int, dtype: str = "float32", shapes: Any = SHAPES) -> list[dict[str, Any]]:
    return [{name: to_tensor(g) for name, g in step.items()} for step in draw_gradients(shapes, dtype, steps)]


def train(optimizer: Any, named: Sequence[tuple[str, Any]], steps: Sequence[dict[str, Any]]) -> None:
    for step in steps:
        for name, p in named:
            p.grad = step.get(name)
        optimizer.step()


def agree(
    fused: Any,
    ours: Sequence[tuple[str, Any]],
    reference: Any,
    theirs: Sequence[tuple[str, Any]],
    units: float = UNITS_OF_STEPS,
) -> None:
    """Parameters, all of the state and all figures are equal, to rounding."""
    read = []
    for optimizer, named in ((fused, ours), (reference, theirs)):
        state = {name: {key: to_numpy(x) for key, x in optimizer.state[p].items()} for name, p in named}
        figures = {name: {k: np.asarray(v) for k, v in own.items()} for name, own in optimizer.stats().items()}
        read.append(({name: to_numpy(p) for name, p in named}, state, figures))
    assert_alike(*read, units)
    assert all(p.stride() == q.stride() for (_, p), (_, q) in zip(ours, theirs, strict=True))
