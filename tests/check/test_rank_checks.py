"""Every check of ranks catches a faulty optimizer and passes a good one; ranks that are stuck are replaced."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from check_faulty_ranks import RANK_FAULTS, StepsWhereThereAreRows
from lanes import by_turns, one_in
from offered import NOT_OFFERED_BY_RANKS

from thalweg.check import check
from thalweg.check.registry import checks_of
from thalweg.check.world import World
from thalweg.errors import CommandError
from thalweg.rules import RULES

pytestmark = pytest.mark.slow
CHECKS = checks_of("ranks")
#: Every rule, a mixture, and a rule of one's own.
OURS = [*(f"thalweg.torch.{rule}" for rule in RULES), "mixed:adamw_and_adafactor", "own_rules:Layerwise"]


#: Checks whose faults two ranks show; those of all others are shown by four, in the night.
BY_TWO = ("replicas-stay-together", "uneven-shards", "files-at-the-same-size")


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds by their number of ranks, which start when they are first asked."""
    with World(2) as two, World(4) as four:
        yield {2: two, 4: four}


@pytest.fixture
def world(worlds: dict[int, World]) -> World:
    return worlds[2]


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(RANK_FAULTS) == set(CHECKS)


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, 2) if name in BY_TWO else pytest.param(name, 4, marks=pytest.mark.nightly) for name in CHECKS],
)
def test_a_check_catches_its_fault(name: str, size: int, worlds: dict[int, World]) -> None:
    found = worlds[size].verdict(CHECKS[name], RANK_FAULTS[name], {}, None)
    assert found.outcome == "failed", found.seen
    assert found.seen


@by_turns("name")
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("ours", one_in(3, OURS))
def test_ours_keep_what_users_rely_on(name: str, ours: str, world: World) -> None:
    facts = {"collectives": 1 if ours == "thalweg.torch.LAMB" else 2} if name == "collectives" else {}
    found = world.verdict(CHECKS[name], ours, {"lr": 0.01}, facts)
    is_left_out = name in NOT_OFFERED_BY_RANKS.get(ours, ())
    assert found.outcome == ("not offered" if is_left_out else "passed"), found.seen


def test_what_other_processes_cannot_have_is_told(world: World) -> None:
    with pytest.raises(CommandError, match="say where it is, as module:Class"):
        world.verdict(CHECKS["fsdp2"], lambda params: None, {}, None)


def test_what_other_processes_cannot_have_is_told_before_anything_is_checked() -> None:
    """After a minute of checks their verdicts would be lost with the error."""
    verdicts: list[Any] = []

    def local(params: Any, lr: float = 0.01) -> Any:
        return torch.optim.SGD(params, lr=lr)

    with pytest.raises(CommandError, match=r"cannot be sent to other processes, .*say where it is, as module:Class"):
        check(local, ranks=2, only="closure-loss,fsdp2", on_verdict=verdicts.append)
    assert not verdicts
    with pytest.raises(CommandError, match="give options that can be pickled"):
        check(torch.optim.SGD, ranks=2, only="closure-loss,fsdp2", on_verdict=verdicts.append, lr=LocalRate(0.1))
    assert not verdicts
    assert not check(local, only="closure-loss").failed


class LocalRate(float):
    """A number that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("local")


@pytest.mark.nightly
def test_ranks_that_disagree_are_replaced(world: World) -> None:
    found = world.verdict(CHECKS["empty-shards"], StepsWhereThereAreRows, {}, None)
    assert found.outcome == "failed"
    assert "rank" in found.seen
    assert world.verdict(CHECKS["empty-shards"], "thalweg.torch.LAMB", {}, None).outcome == "passed"


@pytest.mark.nightly
@pytest.mark.parametrize(("ours", "size"), list(zip(OURS, itertools.cycle([4, 3]), strict=False)))
def test_other_numbers_of_ranks(ours: str, size: int) -> None:
    found = check(ours, ranks=size, only="replicas,shards,messages,checkpoints", lr=0.01)
    assert not found.failed, found.failed
