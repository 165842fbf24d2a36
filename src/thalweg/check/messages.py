"""Messages between ranks: how many a step of shards sends."""

from __future__ import annotations

import pytest
from torch.distributed.tensor.debug import CommDebugMode

from thalweg.check.problem import (
    TorchSubject,
)
from thalweg.check.sharded import (
    MATRICES,
    give_shards,
    require_rows,
    spread,
    train_shards,
)


def test_messages_do_not_grow(s: TorchSubject) -> None:
    """A step sends no more messages later in a run than in its beginning."""
    require_rows(s)
    params, optimizer = spread(s, shapes=MATRICES)
    numbers = []
    for t in range(12):
        give_shards(params, t)
        with CommDebugMode() as seen:
            optimizer.step()
        numbers.append(seen.get_total_counts())
    if max(numbers[6:]) > max(numbers[:6]):
        pytest.fail(f"up to {max(numbers[:6])} collectives in a step at first, then {max(numbers[6:])}")


def test_collectives(s: TorchSubject) -> None:
    """Declared: a step of many shards takes at most so many collectives, however many parameters there are."""
    s.require("collectives")
    require_rows(s)
    params, optimizer = spread(s, shapes=[(8, 4)] * 8)
    train_shards(optimizer, params, 2)
    give_shards(params, 2)
    with CommDebugMode() as seen:
        optimizer.step()
    if seen.get_total_counts() > (s.facts.collectives or 0):
        pytest.fail(f"{seen.get_total_counts()} collectives for 8 parameters, above {s.facts.collectives}")
