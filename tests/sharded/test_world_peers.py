"""Runs of torch's own optimizers are continued over ranks, from whole states and from sharded ones."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from world import world  # noqa: E402
from world_peers import continued  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("case", "before", "after"),
    [
        ("AdamW", "FSDP2", "FSDP2"),
        ("AdamW", "plain", "FSDP2"),
        ("AdamW", "FSDP2", "plain"),
        ("Adafactor", "plain", "FSDP2"),
    ],
)
def test_over_ranks(case: str, before: str, after: str) -> None:
    assert world(2).run(continued, case, before, after) == [[]] * 2
