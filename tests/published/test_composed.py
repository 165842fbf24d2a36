"""What is around a rule equals what is published: schedule-free training of its authors, cautious AdamW of timm."""

from __future__ import annotations

from typing import Any

import pytest
from published_runs import error, ours, peer, problem
from tolerances import FLOAT64

import thalweg.numpy

ADAMW: dict[str, Any] = dict(betas=(0.0, 0.99))
THEIRS: dict[str, Any] = dict(betas=(0.9, 0.99))
ROWS = [
    ("SGDScheduleFree", "SGD", dict(weight_decay=0.1), dict(weight_decay=0.1)),
    ("SGDScheduleFree", "SGD", dict(schedule_free=0.7), dict(momentum=0.7)),
    ("AdamWScheduleFree", "AdamW", dict(ADAMW, weight_decay=0.1), dict(THEIRS, weight_decay=0.1)),
    ("AdamWScheduleFree", "AdamW", dict(ADAMW, schedule_free_warmup=6), dict(THEIRS, warmup_steps=6)),
]


def torch_run(make: Any, params: Any, grads: Any, *, evaluated: bool) -> tuple[list[Any], list[Any]]:
    """Parameters as they are trained, and as they are evaluated."""
    torch = pytest.importorskip("torch")
    tensors = [torch.nn.Parameter(torch.from_numpy(p.copy())) for p in params]
    optimizer = make(tensors)
    if evaluated:
        optimizer.train()
    for step in grads:
        for p, g in zip(tensors, step, strict=True):
            p.grad = torch.from_numpy(g.copy())
        optimizer.step()
    trained = [p.detach().numpy().copy() for p in tensors]
    if evaluated:
        optimizer.eval()
    return trained, [p.detach().numpy() for p in tensors]


@pytest.mark.parametrize(("theirs", "rule", "options", "published"), ROWS)
def test_schedule_free(theirs: str, rule: str, options: dict[str, Any], published: dict[str, Any]) -> None:
    make = getattr(peer("schedulefree"), theirs)
    options = {"schedule_free": True, "weight_decay": 0.0, **options}
    params, grads = problem()
    trained, evaluated = torch_run(lambda p: make(p, lr=0.05, **published), params, grads, evaluated=True)
    optimizer = getattr(thalweg.numpy, rule)(lr=0.05, engine="reference", **options)
    mine = ours(optimizer, params, grads)
    assert error(mine, trained, params) < FLOAT64
    with optimizer.averaged({f"p{i}": p for i, p in enumerate(mine)}):
        assert error(mine, evaluated, params) < FLOAT64


def test_cautious_adamw() -> None:
    timm = peer("timm.optim.adamw")
    params, grads = problem()
    trained, _ = torch_run(
        lambda p: timm.AdamWLegacy(p, lr=0.05, weight_decay=0.1, caution=True), params, grads, evaluated=False
    )
    mine = ours(thalweg.numpy.AdamW(lr=0.05, weight_decay=0.1, cautious=True, engine="reference"), params, grads)
    assert error(mine, trained, params) < FLOAT64
