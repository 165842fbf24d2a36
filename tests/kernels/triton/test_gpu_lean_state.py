"""GPU kernels: state in eight bits, and records of what rounding has cost. tests/engines has the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from on_device import DEVICE, parameters, train

import thalweg.torch
from thalweg.errors import NonFiniteError

pytestmark = pytest.mark.slow  # programs are interpreted

MATRIX = {"matrix": (64, 128)}


def make(rule: str, named: Any, engine: str, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(named, lr=0.01, engine=engine, **options)


def gradients(shapes: Mapping[str, Any], t: int, dtype: torch.dtype) -> dict[str, Any]:
    """Of sizes that differ within every group."""
    generator = torch.Generator().manual_seed(t)
    draws = {name: [torch.randn(shape, generator=generator) for _ in "gs"] for name, shape in shapes.items()}
    return {name: (g * torch.exp(size)).to(DEVICE, dtype) for name, (g, size) in draws.items()}


@pytest.mark.parametrize("what", ["skip", "raise"])
def test_a_gradient_that_is_not_finite_leaves_codes_and_record_as_they_were(what: str) -> None:
    named = parameters("bfloat16", MATRIX)
    optimizer = make("LAMB", named, "fused", state_dtype="int8", rounding="compensated", on_nonfinite=what)
    step = gradients(MATRIX, 0, torch.bfloat16)
    train(optimizer, named, [step])
    p = named[0][1]
    before = {key: entry.clone() for key, entry in optimizer.state[p].items()}
    step["matrix"][1, 2] = torch.inf
    if what == "raise":
        with pytest.raises(NonFiniteError, match="matrix"):
            train(optimizer, named, [step])
    else:
        train(optimizer, named, [step])
        assert optimizer.skipped == 1
    assert all(torch.equal(entry, optimizer.state[p][key]) for key, entry in before.items())
