"""State of shards in the host's memory: the same bits, in turns that all ranks take together."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from world import world
from world_offload import offloaded_apart

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [{}, dict(state_dtype="int8", on_nonfinite="raise")], ids=["float32", "codes"])
def test_every_rank_has_the_bits_of_a_run_without(options: dict[str, Any]) -> None:
    answers = world(2).run(offloaded_apart, "LAMB", options)
    assert [apart for apart, *_ in answers] == [[]] * 2
    (first, second) = (chunks for _, chunks, _ in answers)
    assert first == second > 1


def test_state_that_owners_need_stays_on_the_device() -> None:
    for apart, chunks, told in world(2).run(offloaded_apart, "Kron", {}):
        assert (apart, chunks) == ([], 1)  # of the parameter that is not sharded
        assert "offload_state has no effect: the state of sharded parameters stays on the device, since Kron" in told
