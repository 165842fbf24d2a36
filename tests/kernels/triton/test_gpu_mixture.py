"""Mixtures on GPUs: each rule by its own kernels, in one step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from on_device import DEVICE, agree, gradients, parameters, train

from thalweg.torch import LAMB, AdamW, Kron, Mixture

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


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_captured_steps_go_on() -> None:
    entries = [("matrix", LAMB.options(lr=0.01)), ("*", AdamW.options(lr=0.01))]
    ours, theirs, steps = parameters(shapes=SHAPES), parameters(shapes=SHAPES), gradients(4, shapes=SHAPES)
    captured, eager = (Mixture(named, entries, capturable=True) for named in (ours, theirs))
    train(captured, ours, steps[:2])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for step in steps[2:]:
        for name, p in ours:
            p.grad.copy_(step[name])
        graph.replay()
    train(eager, theirs, steps)
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        assert torch.equal(p, q), name
