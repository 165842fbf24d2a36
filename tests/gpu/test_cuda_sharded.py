"""Parameters that are divided over ranks, on one card that the ranks share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tolerances import TENSOR_CORES
from world import world
from world_messages import replayed
from world_steps import TYPICAL, Run, differences

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rule", ["LARS", "LAMB", "Adafactor", "Muon", "Kron"])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "last axis"), (4, "two axes")])
def test_ranks_on_one_card_have_the_numbers_of_one_process(rule: str, size: int, layout: str) -> None:
    run = Run(rule, "float32", device="cuda", engine="auto")
    # owners of Kron's tensors multiply on tensor cores; None: what is owed in float32
    tolerance = TENSOR_CORES["float32"] if rule == "Kron" else None
    assert world(size).run(differences, run, layout, tolerance) == [[]] * size


def replicas(rule: str, **how: Any) -> Run:
    return Run(rule, "float32", dict(TYPICAL[rule], divide_work=True), device="cuda", replicated=True, **how)


@pytest.mark.parametrize("rule", ["Muon", "Kron"])
@pytest.mark.parametrize(("size", "layout"), [(2, "plain"), (2, "copies"), (4, "copies of shards")])
def test_replicas_on_one_card_have_the_numbers_of_one_process(rule: str, size: int, layout: str) -> None:
    tolerance = TENSOR_CORES["float32"] if rule == "Kron" else None
    assert world(size).run(differences, replicas(rule), layout, tolerance) == [[]] * size


@pytest.mark.parametrize(("slot", "graphs"), [(None, 2), (40, 4)])
def test_launches_around_messages_of_replicas_are_replayed(slot: int | None, graphs: int) -> None:
    run = replicas("Muon", names=("matrix", "even", "kernel"), rates=(1.0, 1.0, 0.5, 0.25) * 3, slot=slot)
    assert world(2).run(replayed, run, "plain") == [(graphs, [])] * 2


@pytest.mark.parametrize(("rule", "graphs"), [("AdamW", 2), ("LAMB", 2), ("Adafactor", 3), ("Muon", 3)])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "mixed")])
def test_launches_around_messages_are_replayed(rule: str, graphs: int, size: int, layout: str) -> None:
    """Steps of which some are replayed have every bit of launched ones; there is a graph before each message."""
    names = ("matrix", "even", "kernel") if rule == "Muon" else ("scalar", "vector", "matrix", "even")
    run = Run(rule, "float32", None, device="cuda", names=names, rates=(1.0, 1.0, 0.5, 0.25) * 2)
    assert world(size).run(replayed, run, layout) == [(graphs, [])] * size
