"""Tasks of a few lines to race on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from thalweg.race import ArrayTask


def parabola(**changes: Any) -> ArrayTask:
    fields = dict(
        name="parabola",
        init=lambda seed: {"x": np.full(4, 1.0 + seed)},
        gradients=lambda params, batch: {"x": 2 * params["x"]},
        evaluate=lambda params: float(np.square(params["x"]).sum()),
    )
    return ArrayTask(**{**fields, "steps": 5, "seeds": 1, **changes})


def brackets() -> ArrayTask:
    return parabola(title="Brackets [/red] 漢", loss_name="loss [$] of $_{")


def misnamed() -> ArrayTask:
    return parabola(gradients=lambda params, batch: {"y": params["x"]})


def bowl(best: float, **changes: Any) -> ArrayTask:
    """After 16 steps of SGD the loss is least at the rate ``best``; how far a rate is off shows from the first on."""

    def evaluate(params: dict[str, Any]) -> float:
        moved = float(params["x"][0])  # SGD adds lr at each step, falling to 0: 8.5 lr in all
        return 2.0 + abs(math.log(max(moved, 1e-12) / (8.5 * best))) if moved else 100.0

    fields = dict(init=lambda seed: {"x": np.zeros(1)}, gradients=lambda params, batch: {"x": -np.ones(1)})
    return parabola(**{**fields, "name": "bowl", "evaluate": evaluate, "steps": 16, **changes})


def linear(**changes: Any) -> Any:
    """A linear layer in torch that learns to add four numbers up."""
    torch = pytest.importorskip("torch")
    from thalweg.race import ModelTask

    def batches(seed: int, batch_size: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(batch_size, 4, generator=generator)
            yield {"x": x, "y": [x.sum(1, keepdim=True)]}

    fields = dict(
        model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.1)),
        loss=lambda model, batch: (model(batch["x"]) - batch["y"][0]).square().mean(),
        evaluate=lambda model: (model[0].weight - 1).square().sum(),
    )
    return ModelTask(**{**fields, "name": "linear", "batches": batches, "batch_size": 8, "seeds": 1, **changes})
