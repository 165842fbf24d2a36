"""A rule of one's own is sharded as ours are: nothing is written for it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from world import world
from world_own_rules import differences

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("engine", ["foreach", "fused"])
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(2, "first axis"), (2, "last axis"), pytest.param(4, "mixed", marks=pytest.mark.nightly)],
)
def test_steps_are_those_of_one_process(ranks: int, layout: str, engine: str) -> None:
    assert world(ranks).run(differences, layout, engine) == [[]] * ranks
