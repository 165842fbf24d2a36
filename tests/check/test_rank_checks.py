"""Every check of ranks catches a faulty optimizer and passes a good one; ranks that are stuck are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from check_faulty_ranks import RANK_FAULTS, StepsWhereThereAreRows
from lanes import one_in

from thalweg.check import check
from thalweg.check.registry import checks_of
from thalweg.check.world import World
from thalweg.errors import CommandError
from thalweg.rules import RULES

pytestmark = pytest.mark.world
CHECKS = checks_of("ranks")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(4) as ranks:
        yield ranks


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(RANK_FAULTS) == set(CHECKS)


@pytest.mark.parametrize("name", one_in(3, CHECKS))
def test_a_check_catches_its_fault_and_passes_a_good_one(name: str, world: World) -> None:
    found = world.verdict(CHECKS[name], RANK_FAULTS[name], {}, None)
    assert found.outcome == "failed", found.seen
    assert found.seen
    facts = {"collectives": 1} if name == "collectives" else {}
    found = world.verdict(CHECKS[name], "thalweg.torch.LAMB", {}, facts)
    assert found.outcome == "passed", found.seen


def test_what_other_processes_cannot_have_is_told(world: World) -> None:
    with pytest.raises(CommandError, match="say where it is: module:Class"):
        world.verdict(CHECKS["fsdp2"], lambda params: None, {}, None)


@pytest.mark.nightly
def test_ranks_that_disagree_are_replaced(world: World) -> None:
    found = world.verdict(CHECKS["empty-shards"], StepsWhereThereAreRows, {}, None)
    assert (found.outcome, found.ranks) == ("failed", 4)
    assert "rank" in found.seen
    assert world.verdict(CHECKS["empty-shards"], "thalweg.torch.LAMB", {}, None).outcome == "passed"


@pytest.mark.nightly
@pytest.mark.parametrize(("rule", "size"), list(zip(RULES, itertools.cycle([4, 2, 3]), strict=False)))
def test_ours_have_no_failure(rule: str, size: int) -> None:
    found = check(f"thalweg.torch.{rule}", ranks=size, only="replicas,shards,messages,checkpoints")
    assert not found.failed, found.failed
