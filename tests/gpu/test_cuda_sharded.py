"""Parameters that are divided over ranks, on one card that the ranks share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tolerances import TENSOR_CORES  # noqa: E402
from world import world  # noqa: E402
from world_repeated import replayed  # noqa: E402
from world_steps import Run, differences  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rule", ["LARS", "LAMB", "Adafactor", "Muon", "Kron"])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "last axis"), (4, "two axes")])
def test_ranks_on_one_card_have_the_numbers_of_one_process(rule: str, size: int, layout: str) -> None:
    run = Run(rule, "float32", device="cuda", engine="auto")
    # owners of Kron's tensors multiply on tensor cores; None: what is owed in float32
    tolerance = TENSOR_CORES["float32"] if rule == "Kron" else None
    assert world(size).run(differences, run, layout, tolerance) == [[]] * size


@pytest.mark.parametrize(("rule", "graphs"), [("AdamW", 2), ("LAMB", 2), ("Adafactor", 3), ("Muon", 3), ("Kron", 3)])
@pytest.mark.parametrize(("size", "layout"), [(2, "first axis"), (2, "mixed")])
def test_launches_around_messages_are_replayed(rule: str, graphs: int, size: int, layout: str) -> None:
    """Steps of which some are replayed have every bit of launched ones; there is a graph before each message."""
    names = ("matrix", "even", "kernel") if rule == "Muon" else ("scalar", "vector", "matrix", "even")
    # every other step of Kron's refreshes factors
    options = dict(precond_update_probability=0.5) if rule == "Kron" else None
    rates = (1.0, 1.0, 0.5, 0.25) * (3 if rule == "Kron" else 2)
    run = Run(rule, "float32", options, device="cuda", names=names, rates=rates)
    assert world(size).run(replayed, run, layout) == [(graphs, [])] * size
