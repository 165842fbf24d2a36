"""State in eight bits over ranks: groups are of places in the whole tensor, so that nothing depends on the layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from lanes import by_day, one_in

pytest.importorskip("torch")

from world import world
from world_lean import kernel_state_apart, refused, resumed, saved, state_apart

pytestmark = pytest.mark.slow

LEAN = dict(state_dtype="int8", state_rounding="stochastic")


@pytest.mark.parametrize(
    ("rule", "size", "layout"),
    by_day(
        [("LAMB", 2, "columns"), ("Kron", 2, "rows")],
        (
            (rule, *laid_out)
            for rule in ("LAMB", "Kron")
            for laid_out in ((2, "rows"), (4, "rows"), (2, "columns"), (4, "both"))
        ),
    ),
)
def test_the_same_bits_in_every_layout(rule: str, size: int, layout: str) -> None:
    for apart in world(size).run(state_apart, rule, layout, LEAN):
        wanted = [entry for entry in apart if rule == "LAMB" or "momentum" in entry]
        assert wanted == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rule", "layout", "options"),
    [
        ("LAMB", "rows", dict(LEAN, rounding="compensated")),
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


@pytest.mark.parametrize(("size", "layout"), one_in(2, [(2, "columns"), (4, "both"), (2, "whole"), (1, "whole")]))
def test_a_checkpoint_is_resumed_in_other_layouts(size: int, layout: str, tmp_path: Path) -> None:
    options = dict(LEAN, engine="foreach")
    world(2).run(saved, tmp_path, "rows", options)
    assert world(size).run(resumed, tmp_path, layout, options) == [[]] * size
