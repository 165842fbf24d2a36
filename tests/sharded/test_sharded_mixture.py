"""Mixtures over ranks: the numbers of one process, and no more messages than the rule that needs most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lanes import by_turns

pytest.importorskip("torch")

from world import world
from world_mixtures import RULES, differences, messages, resumed_elsewhere, told_apart

pytestmark = pytest.mark.slow


@by_turns()
@pytest.mark.parametrize("layout", ["first axis", "last axis", "mixed"])
@pytest.mark.parametrize("arguments", [{}, dict(max_grad_norm=1.0, on_nonfinite="skip", engine="foreach")], ids=str)
def test_steps_are_those_of_one_process(layout: str, arguments: dict[str, Any]) -> None:
    assert world(2).run(differences, layout, **arguments) == [[], []]


@pytest.mark.parametrize("arguments", [{}, dict(max_grad_norm=1.0), dict(on_nonfinite="raise")], ids=str)
def test_rules_share_messages(arguments: dict[str, Any]) -> None:
    most: Counter[str] = Counter()
    for rule in RULES:
        most |= Counter(world(2).run(messages, "first axis", rule, **arguments)[0])
    heard = world(2).run(messages, "first axis", **arguments)
    assert heard == [dict(most)] * 2


def test_ranks_with_other_rules_are_told() -> None:
    told = world(2).run(told_apart, "")
    assert all("rank 0 has the rule Kron, and rank 1 has the rule AdamW" in each for each in told), told


def test_distributed_checkpoints(tmp_path: Path) -> None:
    assert world(2).run(resumed_elsewhere, str(tmp_path)) == [[], []]
