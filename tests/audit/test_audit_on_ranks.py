"""An audit of sharded and of replicated parameters: whole tensors by the page, and replicas beside one another."""

from __future__ import annotations

from typing import Any

import pytest
from world import world
from world_audit import audited_on_ranks

pytestmark = pytest.mark.slow

MAKES: list[tuple[str, dict[str, Any]]] = [
    ("thalweg.LAMB", dict(lr=0.01, weight_decay=0.1)),
    ("thalweg.Kron", dict(lr=0.01)),
    ("torch.AdamW", dict(lr=0.01, weight_decay=0.1)),
]


@pytest.mark.parametrize("layout", ["DDP", "FSDP2", "TP"])
@pytest.mark.parametrize(("make", "options"), MAKES, ids=[make for make, _ in MAKES])
def test_ranks_are_silent(layout: str, make: str, options: dict[str, Any]) -> None:
    (first,), (second,) = world(2).run(audited_on_ranks, layout, make, options)
    assert first.count("as the page") == 4
    assert "0.weight" in first
    assert second == "the report is on rank 0"


def test_a_replica_that_differs_is_named() -> None:
    for findings in world(2).run(audited_on_ranks, "DDP", "torch.AdamW", dict(lr=0.01), "rate"):
        assert "bias on rank 1: was equal to module.2.bias on rank 0, and the step has set them apart" in findings[-2]
