"""Spikes by a plain loop in float64: what is done to each gradient of a run, told by its norm."""

from __future__ import annotations

from typing import Any

import numpy as np

from thalweg import Spikes

SHAPES = {"a": (4, 3), "b": (5,)}
STEPS = 16
#: Steps whose gradients are so many times as large.
LARGE = {9: 50.0, 13: 8.0}
#: By description: what is looked for, and what is done.
KINDS = {
    "skip": Spikes(window=8, z=3.0),
    "clip": Spikes(window=8, z=3.0, action="clip"),
    "scale": Spikes(window=8, z=3.0, action="scale"),
    "quantile": Spikes(window=8, quantile=0.9, action="clip"),
    "skip by quantile": Spikes(window=8, quantile=0.8),
}


def draw(step: int, dtype: str = "float64") -> dict[str, Any]:
    """Parameters (step 0), or gradients of a step."""
    generator = np.random.default_rng((3, step))
    return {name: (generator.normal(size=s) * LARGE.get(step, 1.0)).astype(dtype) for name, s in SHAPES.items()}


def judge_by_hand(norms: list[float], spikes: Spikes) -> list[float | None]:
    """What each norm is to be multiplied by; None: its step is skipped."""
    kept: list[float] = []
    factors: list[float | None] = []
    for norm in norms:
        limit, window = np.inf, kept[-spikes.window :]
        if len(window) >= max(2, spikes.window // 2):
            if spikes.quantile is None:
                limit = np.mean(window) + spikes.z * np.std(window, ddof=1)
            else:
                limit = np.quantile(window, spikes.quantile)
        is_spike = bool(norm > limit)
        target = limit if spikes.action == "clip" else np.mean(window) if window else 0.0
        factors.append(1.0 if not is_spike else None if spikes.action == "skip" else float(target / norm))
        kept.append(min(norm, 2 * limit) if is_spike else norm)
    return factors


def factors_by_hand(spikes: Spikes) -> list[float | None]:
    """Of the steps of a run, from 1 on."""
    norms = [np.sqrt(sum((g**2).sum() for g in draw(t).values())) for t in range(1, STEPS + 1)]
    return judge_by_hand(norms, spikes)
