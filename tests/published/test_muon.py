"""Muon equals torch's, optax's, and the formulas of those who published it, under the settings that the docs name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published_runs import error, optax_peer, ours, peer, problem, torch_peer
from tolerances import BFLOAT16_PRODUCTS, FLOAT64

from thalweg.numpy import Muon

SHAPES = [(24, 40), (40, 24), (16, 16), (1, 30)]

TORCH = [
    pytest.param({}, {}, id="defaults"),
    pytest.param(dict(nesterov=False), dict(nesterov=False), id="without nesterov"),
    pytest.param(
        dict(scaling="match_rms_adamw", weight_decay=0.0),
        dict(adjust_lr_fn="match_rms_adamw", weight_decay=0.0),
        id="match_rms_adamw",
    ),
    pytest.param(
        dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=0.1, momentum=0.8),
        dict(ns_coefficients=(2.0, -1.5, 0.5), ns_steps=3, eps=0.1, momentum=0.8),
        id="numbers",
    ),
]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where a CPU has no products of bfloat16
@pytest.mark.parametrize(("options", "published"), TORCH)
def test_equals_torch(options: dict[str, Any], published: dict[str, Any]) -> None:
    torch = peer("torch")
    params, grads = problem(SHAPES, steps=10)
    theirs = torch_peer(lambda p: torch.optim.Muon(p, lr=0.02, **published), params, grads)
    mine = ours(Muon(lr=0.02, variant="torch", **options), params, grads)
    assert error(mine, theirs, params) < BFLOAT16_PRODUCTS


@pytest.fixture
def without_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's Muon with products in float64: nothing in it names bfloat16 but one conversion."""
    torch = peer("torch")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())


@pytest.mark.usefixtures("without_rounding")
@pytest.mark.parametrize(("options", "published"), TORCH)
def test_equals_torch_without_rounding(options: dict[str, Any], published: dict[str, Any]) -> None:
    torch = peer("torch")
    params, grads = problem(SHAPES)
    theirs = torch_peer(lambda p: torch.optim.Muon(p, lr=0.02, **published), params, grads)
    mine = ours(Muon(lr=0.02, variant="torch", ns_dtype=None, **options), params, grads)
    assert error(mine, theirs, params) < FLOAT64


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "published"),
    [
        pytest.param({}, {}, id="defaults"),
        pytest.param(dict(nesterov=False, momentum=0.8), dict(nesterov=False, beta=0.8), id="without nesterov"),
        pytest.param(
            dict(scaling="match_rms_adamw", rms=0.3, weight_decay=0.1),
            dict(consistent_rms=0.3, weight_decay=0.1),
            id="consistent_rms",
        ),
        pytest.param(dict(eps=0.1, ns_steps=3), dict(eps=0.1, ns_steps=3), id="numbers"),
        pytest.param(dict(ns_preconditioning="aol", ns_steps=4), dict(preconditioning="aol", ns_steps=4), id="aol"),
    ],
)
def test_equals_optax(options: dict[str, Any], published: dict[str, Any]) -> None:
    optax = peer("optax")
    params, grads = problem(SHAPES)
    theirs = optax_peer(optax.contrib.muon(learning_rate=0.02, **published), params, grads)
    assert error(ours(Muon(lr=0.02, variant="optax", **options), params, grads), theirs, params) < FLOAT64


def reference_step(p: Any, g: Any, buffer: Any, *, lr: float, decay: float, summed: bool, matched: bool) -> Any:
    """The equations of KellerJordan/Muon, and of MoonshotAI/Moonlight (summed, matched), in our own words."""
    if summed:
        buffer[...] = 0.95 * buffer + g
        x = g + 0.95 * buffer
    else:
        buffer[...] = buffer + 0.05 * (g - buffer)
        x = g + 0.95 * (buffer - g)
    x = x.reshape(len(x), -1)
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = (x.T if rows > columns else x).reshape(p.shape)
    scale = 0.2 * max(rows, columns) ** 0.5 if matched else max(1, rows / columns) ** 0.5
    return p * (1 - lr * decay) - lr * scale * x


@pytest.mark.parametrize(
    ("variant", "own"), [("original", {}), ("moonlight", dict(decay=0.1, summed=True, matched=True))]
)
def test_equals_the_equations_that_were_published(variant: str, own: dict[str, Any]) -> None:
    params, grads = problem([*SHAPES, (6, 2, 3, 3)])
    current, buffers = list(params), [np.zeros_like(p) for p in params]
    for step in grads:
        given = {"lr": 0.02, "decay": 0.0, "summed": False, "matched": False, **own}
        current = [reference_step(p, g, b, **given) for p, g, b in zip(current, step, buffers, strict=True)]
    assert error(ours(Muon(lr=0.02, variant=variant, ns_dtype=None), params, grads), current, params) < FLOAT64
