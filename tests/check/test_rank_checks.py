"""Every check of ranks catches a faulty optimizer and passes a good one; ranks that are stuck are replaced."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from check_faulty_ranks import RANK_FAULTS, StepsWhereThereAreRows
from offered import NOT_OFFERED_BY_RANKS, assert_keeps

from thalweg.check import check
from thalweg.check.plugin import MODULES, checks_of
from thalweg.errors import CommandError
from thalweg.rules import RULES

pytestmark = pytest.mark.slow
GROUPS = MODULES["ranks"].replace(" ", ",")
#: Every rule, mixtures, and a rule of one's own.
OURS = [
    *(f"thalweg.torch.{rule}" for rule in RULES),
    "mixed:adamw_and_adafactor",
    "mixed:muon_and_adamw",
    "own_rules:Layerwise",
]


def test_every_check_has_a_faulty_optimizer() -> None:
    assert set(RANK_FAULTS) == {each.name for each in checks_of("ranks")}


@pytest.mark.parametrize("fault", set(RANK_FAULTS.values()), ids=lambda fault: fault.__name__)
def test_checks_catch_a_fault(fault: Any) -> None:
    names = [name for name, each in RANK_FAULTS.items() if each is fault]
    report = check(fault, ranks=4, only=",".join(names))
    assert [each.check for each in report.failed if each.seen] == [each.check for each in report.verdicts]


@pytest.mark.parametrize("ours", OURS)
def test_ours_keep_what_users_rely_on(ours: str) -> None:
    # of SOAP, one basis: that of the longer side of a matrix is one of many, which rounding chooses among
    options = {"one_sided": True} if ours == "thalweg.torch.SOAP" else {}
    assert_keeps(check(ours, ranks=2, only=GROUPS, lr=0.01, **options), {"collectives", *NOT_OFFERED_BY_RANKS.get(ours, ())})
    facts = {"collectives": 1 if ours == "thalweg.torch.LAMB" else 2}
    assert_keeps(check(ours, ranks=2, only="collectives", facts=facts, lr=0.01, **options), ())
