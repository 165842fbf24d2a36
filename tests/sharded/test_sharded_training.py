"""What is beside the numbers of training in torch's own wrappers: ZeRO, steps in the backward pass, averages.

`thalweg check --ranks` has networks of every rule under DDP, FSDP2 and tensor parallelism, without what is here.
"""

from __future__ import annotations

import pytest
from tolerances import WORLD
from world import world
from world_steps import Run
from world_training import beside_other_wrappers, differences_with_zero, evaluated, refusal

pytestmark = pytest.mark.slow

#: FSDP2 has no parameters without axes.
NAMES = ("one", "short", "vector", "matrix", "even", "cube")


def test_zero_redundancy_optimizer() -> None:
    run = Run("Adafactor", names=NAMES)
    assert world(2).run(differences_with_zero, run) == [[]] * 2


@pytest.mark.parametrize("given", ["wrapper", "module", "around", "wrapped afterwards"])
def test_gradients_that_are_averaged_after_a_step_in_the_backward_pass_are_refused(given: str) -> None:
    for said, untouched in world(2).run(refusal, given):
        assert "DistributedDataParallel averages gradients over ranks after" in said
        assert "optimizer.step()" in said
        assert "fully_shard" in said
        assert untouched


def test_wrappers_of_other_models_are_no_reason() -> None:
    assert world(2).run(beside_other_wrappers) == [1, 1]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_averages_are_what_a_forward_sees_and_the_next_step_does_not(wrapper: str, given: bool) -> None:
    run = Run("AdamW", options=dict(averaged=0.5), names=NAMES)
    (wanted,) = world(1).run(evaluated, run, "plain", given=given)
    before, averages, after, again, trained = wanted
    assert len({before, averages, trained}) == 3, "or nothing is tried"
    assert (before, averages) == (after, again)
    size = max(map(abs, wanted))
    for found in world(2).run(evaluated, run, wrapper, given=given):
        assert found == pytest.approx(wanted, rel=0, abs=10 * len(NAMES) * WORLD["float64"] * size)
