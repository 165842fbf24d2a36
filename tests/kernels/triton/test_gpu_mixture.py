"""Mixtures on GPUs: each rule by its own kernels, in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import DEVICE, agree, gradients, parameters, train
from tolerances import TENSOR_CORES

from thalweg.torch import LAMB, AdamW, Kron, Mixture

pytestmark = pytest.mark.slow  # programs are interpreted

SHAPES = {"vector": (70,), "matrix": (12, 10), "conv": (5, 4, 3)}


def mixture(named: Any, engine: str, **arguments: Any) -> Any:
    entries = [("matrix", Kron.options(lr=0.01)), ("vector", LAMB.options(lr=0.01)), ("*", AdamW.options(lr=0.01))]
    return Mixture(named, entries, engine=engine, **arguments)


@pytest.mark.parametrize("arguments", [{}, dict(max_grad_norm=1.0)], ids=str)
def test_kernels_step_as_the_rules_do(arguments: dict[str, Any]) -> None:
    ours, theirs, steps = parameters(shapes=SHAPES), parameters(shapes=SHAPES), gradients(3, shapes=SHAPES)
    fused, reference = mixture(ours, "fused", **arguments), mixture(theirs, "reference", **arguments)
    train(fused, ours, steps)
    train(reference, theirs, steps)
    assert (fused.engine, reference.engine) == ("fused", "reference")
    if DEVICE == "cuda":  # Kron's products are in TF32 there
        (_, p), (_, q) = (next(pair for pair in some if pair[0] == "matrix") for some in (ours, theirs))
        assert (p - q).abs().max() <= TENSOR_CORES["float32"] * q.abs().max()
        ours, theirs = ([pair for pair in some if pair[0] != "matrix"] for some in (ours, theirs))
    agree(fused, ours, reference, theirs)


def test_one_decision_about_what_is_not_finite() -> None:
    named, (first, second) = parameters(shapes=SHAPES), gradients(2, shapes=SHAPES)
    optimizer = mixture(named, "auto", on_nonfinite="skip")
    train(optimizer, named, [first])
    before = [p.detach().clone() for _, p in named]
    second["vector"][3] = float("nan")
    train(optimizer, named, [second])
    assert all(torch.equal(p, start) for (_, p), start in zip(named, before, strict=True))
    assert (optimizer.skipped, optimizer.nonfinite()) == (1, ["vector"])
