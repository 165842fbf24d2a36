"""MARS equals its authors' code, and AdamW where it has nothing to correct or to clip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import added_early
from published_runs import error, ours, peer, problem, torch_peer
from tolerances import FLOAT64

from thalweg.numpy import MARS, AdamW


def small_problem() -> tuple[list[Any], list[list[Any]]]:
    """Gradients whose norms, corrected or not, are on either side of 1."""
    params, grads = problem()
    return params, [[g * (1.0 + t % 8) / (4 * np.linalg.norm(g)) for g in step] for t, step in enumerate(grads)]


def run_authors(
    params: list[Any],
    grads: list[list[Any]],
    *,
    betas: tuple[float, float] = (0.95, 0.99),
    gamma: float = 0.025,
    decay: float = 0.0,
    amsgrad: bool = False,
) -> tuple[list[Any], set[bool]]:
    """As mars.py of AGI-Arena/MARS has it, with optimize_1d; and whether gradients were clipped."""
    (b1, b2), found, clipped = betas, [], set()
    for i, start in enumerate(params):
        p, m, v, largest, last = start.copy(), 0.0, 0.0, 0.0, np.zeros_like(start)
        for t, step in enumerate(grads, 1):
            g = step[i]
            c = (g - last) * (gamma * (b1 / (1 - b1))) + g
            norm = np.linalg.norm(c)
            clipped.add(bool(norm > 1))
            c, last = c / norm if norm > 1 else c, g
            m, v = b1 * m + (1 - b1) * c, b2 * v + (1 - b2) * c * c
            largest = np.maximum(largest, v)
            root = np.sqrt(largest if amsgrad else v)
            p = p - 0.01 * (decay * p + m / ((root / np.sqrt(1 - b2**t) + 1e-8) * (1 - b1**t)))
        found.append(p)
    return found, clipped


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        (dict(gamma=0.1, weight_decay=0.1), dict(gamma=0.1, decay=0.1)),
        (dict(betas=(0.9, 0.95), amsgrad=True), dict(betas=(0.9, 0.95), amsgrad=True)),
    ],
    ids=str,
)
def test_it_is_its_authors_code(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    params, grads = small_problem()
    wanted, clipped = run_authors(params, grads, **theirs)
    assert clipped == {True, False}
    assert error(ours(MARS(lr=0.01, **options), params, grads), wanted, params) < FLOAT64


def test_vectors_by_adamw_are_a_mixture() -> None:
    peers = peer("pytorch_optimizer")
    import thalweg.torch

    def mixture(params: list[Any]) -> Any:
        entries = [
            (lambda name, p: p.ndim > 1, thalweg.torch.MARS.options(lr=0.01)),
            ("*", thalweg.torch.AdamW.options(lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)),
        ]
        return thalweg.torch.Mixture([(f"p{i}", p) for i, p in enumerate(params)], entries)

    def add_early(optimizer: Any, t: int) -> None:
        for group in optimizer.param_groups:
            for name, value in added_early(group["betas"][1]).items():
                group[name] = value(t)

    params, grads = small_problem()
    theirs = torch_peer(lambda p: peers.MARS(p, lr=0.01, lr_1d=0.02), params, grads)
    assert error(torch_peer(mixture, params, grads, before=add_early), theirs, params) < FLOAT64


def test_without_correction_short_gradients_are_adamw_s() -> None:
    params, grads = problem()
    grads = [[0.9 * g / np.linalg.norm(g) for g in step] for step in grads]
    options: dict[str, Any] = dict(lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    theirs = ours(AdamW(**options), params, grads)
    assert error(ours(MARS(gamma=0.0, **options), params, grads), theirs, params) < FLOAT64


def test_squares_that_overflow_are_not_finite() -> None:
    """Their norm would clip a gradient to nothing."""
    p, optimizer = np.ones(3, np.float32), MARS(on_nonfinite="skip")
    optimizer.step({"p": p}, {"p": np.full(3, 0.1, np.float32)})
    before, state = p.copy(), {key: value.copy() for key, value in optimizer.state["p"].items()}
    optimizer.step({"p": p}, {"p": np.full(3, 1e30, np.float32)})
    assert (p == before).all()
    assert all((optimizer.state["p"][key] == value).all() for key, value in state.items() if key != "step")


def test_figures() -> None:
    p, optimizer = np.ones(4), MARS(gamma=0.1, betas=(0.5, 0.9))
    optimizer.step({"p": p}, {"p": np.full(4, 1.0)})
    found = optimizer.stats()["p"]
    assert (found["grad_norm"], found["corrected_norm"]) == (2.0, pytest.approx(2.2))
