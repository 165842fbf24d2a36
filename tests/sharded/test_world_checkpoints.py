"""A checkpoint of some ranks is resumed by any number of others, in any layout, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from world import world  # noqa: E402
from world_checkpoints import NAMES, resume, save  # noqa: E402

pytestmark = [pytest.mark.world, pytest.mark.slow]

EVERY = pytest.mark.parametrize("case", NAMES)
MOVES = [
    ("FSDP2", 2, "plain", 1),
    ("plain", 1, "FSDP2", 2),
    ("FSDP2", 2, "FSDP2", 4),
    ("FSDP2", 4, "FSDP2", 2),
    ("FSDP2", 2, "TP", 2),
    ("TP", 2, "FSDP2", 2),
    ("TP", 2, "plain", 1),
    ("DDP", 2, "FSDP2", 2),
    ("FSDP2", 2, "DDP", 2),
    ("FSDP2", 2, "FSDP2 and TP", 4),
    ("FSDP2 and TP", 4, "TP", 2),
    ("HSDP", 4, "plain", 1),
    ("plain", 1, "HSDP", 4),
]
WAYS = ["flat", "offloaded", "full", "full, flat", "broadcast"]


@EVERY
@pytest.mark.parametrize(("before", "ranks", "after", "others"), MOVES)
def test_resumed_elsewhere(tmp_path: Path, case: str, before: str, ranks: int, after: str, others: int) -> None:
    world(ranks).run(save, tmp_path, case, before)
    assert world(others).run(resume, tmp_path, case, after) == [[]] * others


@EVERY
@pytest.mark.parametrize("way", WAYS)
def test_every_form_of_a_state_dict(tmp_path: Path, case: str, way: str) -> None:
    world(2).run(save, tmp_path, case, "FSDP2", way)
    assert world(2).run(resume, tmp_path, case, "TP", way) == [[]] * 2
