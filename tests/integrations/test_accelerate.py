"""accelerate on two ranks: what one process learns, resumed in the middle, with overrides by name."""

from __future__ import annotations

from pathlib import Path

import accelerate  # noqa: F401
import pytest
import torch
from tolerances import WORLD_TRAINED
from world import world
from world_accelerate import alone, together


@pytest.mark.slow
@pytest.mark.parametrize("way", ["DDP", "FSDP2"])
def test_ranks_learn_what_one_process_learns(way: str, tmp_path: Path) -> None:
    expected = alone()
    for sharded, found in world(2).run(together, way, str(tmp_path)):
        assert sharded == (way == "FSDP2")
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=WORLD_TRAINED)
