"""Many ranks, and a long run that loses one: the numbers of one undisturbed process."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from world import world
from world_layouts import MANY
from world_soak import EVERY, soak
from world_steps import RULES, TYPICAL, Run, cases_for, differences

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@cases_for(RULES)
@pytest.mark.parametrize("layout", [*MANY, "plain"])
def test_eight_ranks(rule: str, layout: str) -> None:
    run = Run(rule, options=dict(TYPICAL[rule], divide_work=True), replicated=True)
    assert world(8).run(differences, run, layout) == [[]] * 8


@pytest.mark.parametrize("rule", ["Muon", "Kron"])
def test_a_rank_is_killed_and_the_job_resumed_by_fewer(rule: str, tmp_path: Path) -> None:
    """200 steps; after the 110th rank 3 of HSDP is gone, and two ranks of FSDP2 go on from the last checkpoint."""
    with pytest.raises(AssertionError, match="soak on 4 ranks"):
        world(4).run(soak, tmp_path, rule, "HSDP", 200, 110, divide_work=True)
    assert sorted(int(each.name) for each in tmp_path.iterdir()) == list(range(EVERY, 110, EVERY))
    assert world(2).run(soak, tmp_path, rule, "FSDP2", 200, divide_work=True) == [[]] * 2
