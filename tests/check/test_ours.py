"""Our optimizers keep what `thalweg check` asks of anybody's: every rule, mixtures, and a rule of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import mixed
from lanes import one_in
from own_rules import Layerwise

import thalweg.torch
from thalweg.check import parametrize
from thalweg.check.registry import checks_of
from thalweg.rules import RULES

OURS = {rule: getattr(thalweg.torch, rule) for rule in RULES}
OTHERS = {each.__name__: each for each in (mixed.adamw_and_adafactor, mixed.muon_and_adamw, Layerwise)}
#: Of a rule of ours `make test` has every check, of a mixture and of a rule of one's own one in six; of all others one
#: in 48, each beginning at another.
ONE_IN = {"LAMB": 1, "Layerwise": 6, "adamw_and_adafactor": 6}
#: Groups of checks that `make test-fast` has too, of the rule that has all.
FAST = {each.name for each in checks_of("torch").values() if each.group in ("contract", "numbers", "state")}
#: Without momentum SGD has no state; of both sides SOAP's bases are not unique.
NEEDED: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "SOAP": {"one_sided": True}, "Layerwise": {"lr": 0.01}}


def checks_for(name: str, optimizer: Any, **options: Any) -> list[Any]:
    """The checks of one optimizer as parameters."""
    (_, checks) = parametrize(optimizer, **NEEDED.get(name, {}), **options).args
    words = "-".join([name, *options.values()])
    found = []
    for each in checks:
        marks = [] if name == "LAMB" and not options and each.id in FAST else [pytest.mark.slow]
        marks += [pytest.mark.nightly] if each.id == "compiles" else []
        found.append(pytest.param(*each.values, id=f"{words}-{each.id}", marks=marks))
    return found


def with_every_optimizer() -> list[Any]:
    found = []
    for place, (name, optimizer) in enumerate((OURS | OTHERS).items()):
        found += one_in(ONE_IN.get(name, 48), checks_for(name, optimizer), first=2 * place)
    return found


def with_other_engines() -> list[Any]:
    """Every fourth check once by each engine, for one rule after the other."""
    found = []
    for place, (name, optimizer) in enumerate(OURS.items()):
        for engine, first in (("reference", place), ("foreach", place + 1)):
            found += one_in(4 * len(OURS), checks_for(name, optimizer, engine=engine), first=first)
    return found


@pytest.mark.parametrize("check", [*with_every_optimizer(), *with_other_engines()])
def test_ours_keep_what_users_rely_on(check: Callable[[], Any]) -> None:
    check()
