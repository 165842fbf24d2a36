"""A small network in torch's own wrappers: the training of one process, with steps in the backward pass too.

`thalweg check --ranks` has the same for every rule under DDP, FSDP2 and tensor parallelism, without what is here.
"""

from __future__ import annotations

import pytest
from tolerances import WORLD_TRAINED

pytest.importorskip("torch")

from lanes import by_turns, once, one_in
from world import world
from world_steps import LR, RULES, TYPICAL
from world_training import beside_other_wrappers, evaluated_apart, furthest, furthest_with_zero, refusal

pytestmark = pytest.mark.slow

NIGHT = {each[1]: pytest.param(*each, marks=pytest.mark.nightly) for each in ((2, "FSDP2"), (4, "HSDP"))}


@by_turns("wrapper")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("size", "wrapper"), [(2, "DDP"), (2, "FSDP2, offloaded"), NIGHT["FSDP2"], NIGHT["HSDP"]])
def test_gradients_that_add_up_over_pieces_of_a_batch(rule: str, size: int, wrapper: str) -> None:
    for losses, parameters, engine in world(size).run(furthest, wrapper, rule, LR[rule], TYPICAL[rule], pieces=2):
        assert max(losses, parameters) < WORLD_TRAINED
        assert engine == "fused" or rule not in ("LAMB", "LARS")


@by_turns("wrapper", first=1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("wrapper", "pieces"), one_in(2, [("FSDP2", 2), ("FSDP2", 1), ("FSDP2, offloaded", 1)]))
def test_sharded_gradients_are_reduced_before_a_step_in_the_backward_pass(rule: str, wrapper: str, pieces: int) -> None:
    found = world(2).run(furthest, wrapper, rule, LR[rule], TYPICAL[rule], pieces=pieces, in_backward=True)
    for losses, parameters, _ in found:
        assert max(losses, parameters) < WORLD_TRAINED


@once(3)
@pytest.mark.parametrize("rule", RULES)
def test_zero_redundancy_optimizer(rule: str) -> None:
    # parameters have no names there, and noise goes by names
    noiseless = dict(damping_mode="expected") if rule == "Kron" else {}
    for found in world(2).run(furthest_with_zero, rule, LR[rule], {**TYPICAL[rule], **noiseless}):
        assert max(found) < WORLD_TRAINED


@pytest.mark.parametrize("given", one_in(4, ["wrapper", "module", "around", "wrapped afterwards"]))
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
    for found in world(2).run(evaluated_apart, wrapper, given=given):
        assert max(found.values()) < WORLD_TRAINED, found
