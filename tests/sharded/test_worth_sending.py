"""Replicas divide work by themselves only if the answer, refreshed factors included, arrives before it is computed."""

from __future__ import annotations

import pytest

from thalweg.rules import Annealed, Kron
from thalweg.rules.whole import is_worth_sending


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_factors_count_as_often_as_they_are_refreshed(device: str) -> None:
    shape = {"cuda": (4096, 4096), "cpu": (64, 64)}[device]
    worth = [
        is_worth_sending(Kron(precond_update_probability=share), shape, "float32", device)
        for share in (0.03, 1.0, Annealed(low=0.03), Annealed(low=1.0))
    ]
    assert worth == [True, False, True, False]


@pytest.mark.parametrize(("probability", "divided"), [(0.03, 2), (1.0, 0)])
def test_an_optimizer_tells_what_it_divides(probability: float, divided: int) -> None:
    torch = pytest.importorskip("torch")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from thalweg.torch import Kron as Optimizer

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        named = [(f"w{i}", torch.nn.Parameter(torch.ones(64, 64))) for i in range(2)]
        group = torch.distributed.group.WORLD
        optimizer = Optimizer(named, lr=0.1, precond_update_probability=probability, replicas=group)
        told = "replicas divide the work on 2" if divided else "replicas do not divide the work on 2"
        assert told in str(optimizer.explain())
    finally:
        torch.distributed.destroy_process_group()
