"""A rule of one's own over ranks, beside the same steps in one process."""

from __future__ import annotations

from typing import Any

from own_rules import Layerwise
from tolerances import WORLD
from world_layouts import SHAPES, drawn, gradient, plain, torch
from world_layouts import layout as laid_out
from world_steps import further_than

import thalweg.torch

STEPS = 3


def stepped(layout: str, engine: str) -> tuple[dict[str, Any], Any]:
    place = plain if layout == "one process" else laid_out(layout)
    own = {name: torch.nn.Parameter(place(name, drawn(name, 0, "float64"))) for name in SHAPES}
    optimizer = thalweg.torch.optimizer(Layerwise)(own.items(), lr=0.05, engine=engine)
    for step in range(STEPS):
        for name, p in own.items():
            p.grad = gradient("alike", drawn(name, step + 1, "float64"), p)
        optimizer.step()
    return own, optimizer


def differences(layout: str, engine: str) -> list[str]:
    """What is not as in one process: parameters, state and trust ratios."""
    (wanted, one), (got, other) = stepped("one process", engine), stepped(layout, engine)
    figures, expected = other.stats(), one.stats()
    found: list[str] = []
    for name, p in wanted.items():
        start = drawn(name, 0, "float64")
        found += further_than(WORLD["float64"], name, got[name].detach(), p.detach(), start)
        entry = one.state[p]["exp_avg"]
        found += further_than(WORLD["float64"], name, other.state[got[name]]["exp_avg"], entry, torch.zeros_like(entry))
        ratio = expected[name]["trust_ratio"]
        if abs(figures[name]["trust_ratio"] - ratio) > WORLD["float64"] * abs(ratio):
            found.append(f"{name}: {figures[name]} instead of {expected[name]}")
    return found
