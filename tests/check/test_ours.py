"""Our optimizers keep what `thalweg check` asks of anybody's: every rule, mixtures, and a rule of one's own."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import mixed
import pytest
import torch
from day import BY_DAY
from offered import BY_NONE, NOT_OFFERED, ON_GPU, assert_keeps
from own_rules import Layerwise

import thalweg.torch
from thalweg.check import check
from thalweg.check.plugin import checks_of, names_of
from thalweg.rules import RULES

OURS = {rule: getattr(thalweg.torch, rule) for rule in RULES}
OTHERS = {each.__name__: each for each in (mixed.adamw_and_adafactor, mixed.muon_and_adamw, Layerwise)}
#: Without momentum SGD has no state.
NEEDED: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Layerwise": {"lr": 0.01}}


#: By day, rules whose steps take longest are not asked for their hundreds of steps under schedulers, which see no rule.
SLOW = {"Kron", "SOAP"} if BY_DAY else set()
OF_SLOW = [name for name, _ in map(names_of, checks_of("torch")) if name not in ("schedulers", "one-cycle", "descends")]


@pytest.mark.parametrize(
    "name", ["LAMB", *(pytest.param(name, marks=pytest.mark.slow) for name in OURS | OTHERS if name != "LAMB")]
)
def test_ours_keep_what_users_rely_on(name: str) -> None:
    left_out = BY_NONE | NOT_OFFERED[name] | (set() if torch.cuda.is_available() else ON_GPU)
    only = ",".join(OF_SLOW) if name in SLOW else None
    assert_keeps(check((OURS | OTHERS)[name], only=only, **NEEDED.get(name, {})), left_out)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "engine"), list(zip(OURS, cycle(("reference", "foreach")))))
def test_other_engines_keep_what_depends_on_them(name: str, engine: str) -> None:
    only = f"layouts,resumes-to-the-bit,resumes-16-bits,{','.join(ON_GPU)}"
    report = check(OURS[name], only=only, engine=engine, **NEEDED.get(name, {}))
    left_out = NOT_OFFERED[name] | (set() if torch.cuda.is_available() else ON_GPU)
    assert_keeps(report, left_out & {each.check for each in report.verdicts})
