"""State in eight bits over ranks: groups are of places in the whole tensor, so that nothing depends on the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes import by_turns

pytest.importorskip("torch")

from world import world
from world_lean import kernel_state_apart, refused, resumed, saved, state_apart

pytestmark = pytest.mark.slow

LEAN = dict(state_dtype="int8", state_rounding="stochastic")


@by_turns()
@pytest.mark.parametrize(("size", "layout"), [(2, "rows"), (4, "rows"), (2, "columns"), (4, "both")])
@pytest.mark.parametrize("rule", ["LAMB", "Kron"])
def test_the_same_bits_in_every_layout(rule: str, size: int, layout: str) -> None:
    for apart in world(size).run(state_apart, rule, layout, LEAN):
        wanted = [entry for entry in apart if rule == "LAMB" or "momentum" in entry]
        assert wanted == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "layout", "options"),
    [
        pytest.param("LAMB", "rows", dict(LEAN, rounding="compensated"), marks=pytest.mark.nightly),
        ("LAMB", "columns", dict(LEAN, rounding="compensated")),
        ("Kron", "rows", dict(momentum_dtype="int8")),
    ],
)
def test_the_same_bits_by_kernels_for_gpus(rule: str, layout: str, options: dict[str, str]) -> None:
    pytest.importorskip("triton")
    for apart in world(2).run(kernel_state_apart, rule, layout, options):
        assert [entry for entry in apart if rule == "LAMB" or "momentum" in entry] == []


def test_a_shard_that_cuts_a_group_is_refused_on_every_rank() -> None:
    for told in world(2).run(refused, "columns", (64, 192)):
        assert "'w' of shape (64, 192) is sharded with" in told
        assert "groups of 64" in told
        assert "state_dtype='bfloat16'" in told
    assert world(2).run(refused, "columns", (64, 128)) == [""] * 2


def test_a_checkpoint_is_resumed_in_other_layouts(tmp_path: Path) -> None:
    options = dict(LEAN, engine="foreach")
    world(2).run(saved, tmp_path, "rows", options)
    assert world(4).run(resumed, tmp_path, "both", options) == [[]] * 4
    assert world(1).run(resumed, tmp_path, "whole", options) == [[]]
