"""Kron's kernels on a GPU: steps in a CUDA graph, the same bits run after run, and no waiting for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from on_device import DEVICE, no_waiting

from thalweg.kernels.triton.kron import KronKernels
from thalweg.rules import Kron
from thalweg.settings import Handling
from thalweg.spaces import torch as space
from thalweg.storage import first_state

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")

SHAPES = {(300, 200): 2, (200, 300): 2, (130,): 3, (256, 256): 1}


class Model:
    """Parameters of several shapes, with gradients that stay where they are."""

    def __init__(self, home: str, **handling: Any) -> None:
        self.rule = Kron(precond_update_probability=0.6).for_storage(None)
        self.handling = Handling(**handling)
        self.generator = torch.Generator(DEVICE).manual_seed(0)
        self.kernels, self.lr, self.home = KronKernels(), torch.zeros((), device=DEVICE), home
        self.buckets = []
        for shape, count in SHAPES.items():
            params = [torch.randn(shape, device=DEVICE, generator=self.generator) for _ in range(count)]
            states = [first_state(space, self.rule, self.handling, p) for p in params]
            for s in states:
                s["step"], s["refresh"] = torch.zeros((), device=home), s["refresh"].to(home)
            names = [f"{shape} {i}" for i in range(count)]
            self.buckets.append((names, params, [torch.empty_like(p) for p in params], states))

    def draw(self, t: int) -> None:
        self.lr.fill_(0.01 * t)
        for _, _, grads, _ in self.buckets:
            for g in grads:
                g.normal_(generator=self.generator)

    def step(self, t: int | None) -> None:
        for bucket in self.buckets:
            self.kernels.step(*bucket, rule=self.rule, handling=self.handling, t=t, lr=self.lr)

    def everything(self) -> list[torch.Tensor]:
        return [
            x
            for _, params, _, states in self.buckets
            for p, s in zip(params, states, strict=True)
            for x in (p, *s.values())
        ]


def trained(*, captured: bool, policy: str = "skip", steps: int = 8) -> Model:
    """After some steps, those from the fourth on replayed from a graph if asked."""
    model, graph = Model(DEVICE, on_nonfinite=policy), torch.cuda.CUDAGraph()
    for t in range(1, steps + 1):
        model.draw(t)
        if captured and t >= 4:
            if t == 4:
                with torch.cuda.graph(graph):
                    model.step(None)
            graph.replay()
        else:
            model.step(None)
    torch.cuda.synchronize()
    return model


@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_a_captured_step_replays_with_the_same_bits(policy: str) -> None:
    """Rates, counts and refreshes are those of each replay."""
    plain, again = trained(captured=False, policy=policy), trained(captured=False, policy=policy)
    replayed = trained(captured=True, policy=policy)
    assert all(s["step"].item() == 8 for _, _, _, states in replayed.buckets for s in states)
    for first, second, third in zip(*(model.everything() for model in (plain, again, replayed)), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third)


@pytest.mark.parametrize("home", ["cpu", "cuda"])
def test_no_step_waits_for_the_device(home: str) -> None:
    model = Model(home)
    for t in range(1, 8):
        model.draw(t)
        with no_waiting() if t > 3 else contextlib.nullcontext():
            model.step(t if home == "cpu" else None)
    assert all(torch.isfinite(x).all() for x in model.everything())


def test_what_is_compiled_together_steps_as_well() -> None:
    models = [Model("cpu"), Model("cpu")]
    models[0].kernels.prepare(
        [
            dict(names=names, params=p, grads=g, states=s, rule=models[0].rule, handling=models[0].handling, t=1)
            for names, p, g, s in models[0].buckets
        ]
    )
    for model in models:
        model.draw(1)
        model.step(1)
    assert all(torch.equal(a, b) for a, b in zip(*(model.everything() for model in models), strict=True))
