"""Every check of ranks catches a faulty optimizer and passes a good one; ranks that are stuck are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from check_faulty_ranks import RANK_FAULTS, StepsWhereThereAreRows
from day import BY_DAY
from offered import NOT_OFFERED_BY_RANKS, assert_keeps
from world import start_server

from thalweg.check import Report, check, plugin
from thalweg.check.plugin import checks_of, choose_checks, make_world, names_of, run_checks
from thalweg.check.ranks import Ranks
from thalweg.check.subject import subject_of
from thalweg.errors import CommandError
from thalweg.rules import RULES

pytestmark = pytest.mark.slow
OTHERS = ["mixed:adamw_and_adafactor", "mixed:muon_and_adamw", "own_rules:Layerwise"]
#: Every rule, mixtures, and a rule of one's own.
OURS = [*(f"thalweg.torch.{rule}" for rule in RULES), *OTHERS]
#: How many collectives a step of shards takes, where these are not two.
COLLECTIVES = {"thalweg.torch.LAMB": 1}
GROUPS = "replicas,shards,messages,checkpoints"
#: By day, one rule of each kind has all of them (sums of tensors, of rows, owners of whole tensors), and the others,
#: which have no more kinds of messages or of state, have these.
EACH_KIND = [f"thalweg.torch.{rule}" for rule in ("LAMB", "Adafactor", "Muon")]
FEW = "replicas-stay-together,ddp-equals-one-process,fsdp2,uneven-shards,nan-in-one-shard,state-is-sharded,"
FEW += "messages-do-not-grow,files-at-fewer-ranks"
#: Other numbers of ranks, by day for one rule, which has what two ranks have not.
FOUR = "replicated-shards,shards-of-rows-and-columns,fsdp2-and-tensor-parallel,stages,files-on-another-mesh"
MORE = [("thalweg.torch.LAMB", 4, FOUR)] if BY_DAY else list(product(OURS, (3, 4), [GROUPS]))


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    start_server()
    world = make_world(2)
    yield world
    world.close()


def run(optimizer: Any, only: str, world: Ranks, facts: Any = None, **options: Any) -> Report:
    """As `check` does, with ranks that serve one optimizer after the other."""
    return run_checks(subject_of(optimizer, options, facts), choose_checks("torch", only, world.size), world)


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(RANK_FAULTS) == {names_of(each)[0] for each in checks_of("ranks")}


@pytest.mark.parametrize("name", RANK_FAULTS)
def test_a_check_catches_its_fault(name: str, two: Ranks) -> None:
    fault = RANK_FAULTS[name]
    if name == "replicated-shards":  # two ranks have no shards with replicas of each
        (verdict,) = check(fault, ranks=4, only=name).failed
    else:
        (verdict,) = run(fault, name, two).failed
    assert verdict.seen


@pytest.mark.parametrize("ours", OURS)
def test_ours_keep_what_users_rely_on(ours: str, two: Ranks) -> None:
    report = run(ours, FEW if BY_DAY and ours not in EACH_KIND else GROUPS, two, lr=0.01)
    not_offered = {"collectives", *NOT_OFFERED_BY_RANKS.get(ours, ())}
    assert_keeps(report, not_offered & {each.check for each in report.verdicts})
    facts = {"collectives": COLLECTIVES.get(ours, 2)}
    assert_keeps(run(ours, "collectives", two, facts, lr=0.01), ())


@pytest.mark.parametrize(("ours", "ranks", "only"), MORE)
def test_ours_keep_it_over_more_ranks(ours: str, ranks: int, only: str) -> None:
    report = check(ours, ranks=ranks, only=only, lr=0.01)
    assert not report.failed, report.failed


def test_what_other_processes_cannot_have_is_told_before_anything_is_checked() -> None:
    """After a minute of checks their verdicts would be lost with the error."""
    closures: list[Any] = []

    class Local(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closures.append(closure)
            return super().step(closure)

    both = "closure-loss,fsdp2"
    with pytest.raises(CommandError, match=r"cannot be sent to other processes, .*say where it is, as module:Class"):
        check(Local, ranks=2, only=both, lr=0.01)
    assert not any(closures)
    with pytest.raises(CommandError, match="give options that can be pickled"):
        check(torch.optim.SGD, ranks=2, only=both, lr=LocalRate(0.1))
    assert not check(Local, only="closure-loss", lr=0.01).failed
    assert any(closures)


class LocalRate(float):
    """A number that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("local")


def test_ranks_that_disagree_are_replaced(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "PATIENCE", 2.0)
    (verdict,) = run(StepsWhereThereAreRows, "empty-shards", two).failed
    assert "rank" in verdict.seen
    assert_keeps(run("thalweg.torch.LAMB", "empty-shards", two, lr=0.01), ())
