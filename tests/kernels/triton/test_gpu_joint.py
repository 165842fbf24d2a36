"""What all gradients decide together, where kernels measure them: as it is decided without kernels."""

from __future__ import annotations

from typing import Any

import pytest
from on_device import DEVICE, FEW, agree, gradients, parameters, train

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402

pytestmark = pytest.mark.slow  # programs are interpreted


def make(rule: str, named: Any, engine: str, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(named, lr=0.01, engine=engine, **options)


def test_all_at_once_with_a_scaler_and_gradients_of_two_dtypes() -> None:
    """What a GradScaler leaves to a step comes first; a gradient lies across memory; two have 16 bits."""
    runs = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("AdamW", named, engine, max_grad_norm=0.5, on_nonfinite="skip")
        for t, step in enumerate(gradients(4, shapes=FEW)):
            for name, p in named:
                p.grad_dtype = None
                g = step[name] * 8
                p.grad = g.mT.contiguous().mT if name == "matrix" else g.bfloat16()
            optimizer.grad_scale = torch.full((), 8.0, device=DEVICE)
            optimizer.found_inf = torch.full((), float(t == 2), device=DEVICE)
            optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf
        runs.append((optimizer, named))
    (fused, ours), (reference, theirs) = runs
    assert fused.skipped == reference.skipped == 1
    agree(fused, ours, reference, theirs)


def test_a_bound_that_changes_from_step_to_step() -> None:
    runs = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("AdamW", named, engine, max_grad_norm=0.5)
        for limit, step in zip((0.5, 0.1, None, 2.0), gradients(4, shapes=FEW), strict=True):
            optimizer.param_groups[0]["max_grad_norm"] = limit
            train(optimizer, named, [step])
        runs += [optimizer, named]
    agree(*runs)
