"""Stepping in the backward pass on several ranks: as in one process, or refused."""

from __future__ import annotations

import pytest
from lanes import by_turns
from tolerances import WORLD_TRAINED

pytest.importorskip("torch")

from world import world
from world_steps import LR, TYPICAL, cases_for
from world_training import beside_other_wrappers, furthest_in_backward, refusal

pytestmark = pytest.mark.slow


@by_turns("wrapper", "pieces")
@cases_for()
@pytest.mark.parametrize(("wrapper", "pieces"), [("FSDP2", 1), ("FSDP2", 2), ("FSDP2, offloaded", 1)])
def test_sharded_gradients_are_reduced_before_the_step(rule: str, wrapper: str, pieces: int) -> None:
    for losses, parameters in world(2).run(furthest_in_backward, wrapper, rule, LR[rule], pieces, TYPICAL[rule]):
        assert losses < WORLD_TRAINED
        assert parameters < WORLD_TRAINED


@pytest.mark.parametrize("given", ["wrapper", "module", "around", "wrapped afterwards"])
def test_gradients_that_are_averaged_after_the_step_are_refused(given: str) -> None:
    for said, untouched in world(2).run(refusal, given):
        assert "DistributedDataParallel averages gradients over ranks after" in said
        assert "optimizer.step()" in said
        assert "fully_shard" in said
        assert untouched


def test_wrappers_of_other_models_are_no_reason() -> None:
    assert world(2).run(beside_other_wrappers) == [1, 1]
