"""Tables that are filled during the launches of a step, which may be recorded and replayed."""

from __future__ import annotations

import pytest
import torch

from thalweg.kernels.triton.uploads import BLOCK_BYTES, Fillings, Uploads, fillings


def fill_two(filled: Fillings) -> list[torch.Tensor]:
    """Fill two tables while this is set."""
    uploads, tables = Uploads(torch.device("cpu")), [torch.zeros(3, dtype=torch.int64), torch.zeros((2, 2))]
    token = fillings.set(filled)
    try:
        uploads.refill(tables[0], [1, 2, 3])
        uploads.refill(tables[1], torch.full((2, 2), 0.5))
    finally:
        fillings.reset(token)
    return tables


def test_what_is_filled_is_counted() -> None:
    counted = Fillings()
    tables = fill_two(counted)
    assert tables[0].tolist() == [1, 2, 3]
    assert counted.used == 2 * BLOCK_BYTES
    assert not counted.tables


def test_a_recorded_step_fills_from_memory_that_is_not_its_own() -> None:
    room = torch.zeros(2 * BLOCK_BYTES, dtype=torch.uint8)
    recorded = Fillings(room)
    tables = fill_two(recorded)
    assert [table.count_nonzero().item() for table in tables] == [0, 0], "it is filled when all is recorded"
    for own, host in recorded.tables:
        assert own.untyped_storage().data_ptr() == room.data_ptr()
        own.copy_(host)
    assert [own.tolist() for own, _ in recorded.tables] == [[1, 2, 3], [[0.5, 0.5], [0.5, 0.5]]]


def test_more_than_was_counted_is_refused() -> None:
    with pytest.raises(RuntimeError, match="more tables than the same step before"):
        fill_two(Fillings(torch.zeros(BLOCK_BYTES, dtype=torch.uint8)))
