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
from thalweg.rules import RULES

#: Every rule, two mixtures, and a rule of one's own.
OURS = {rule: getattr(thalweg.torch, rule) for rule in RULES}
OTHERS = {each.__name__: each for each in (mixed.adamw_and_adafactor, mixed.muon_and_adamw, Layerwise)}
#: Of a rule of ours `make test` has every check, of one of one's own and of a mixture one in six; of all others one in
#: 24, each beginning at another.
ONE_IN = {"LAMB": 1, "Layerwise": 6, "adamw_and_adafactor": 6}


def checks_for(name: str, optimizer: Any, **options: Any) -> list[Any]:
    """The checks of one optimizer as parameters; all are marked `slow`."""
    # without momentum SGD has no state, and of both sides SOAP's bases are not unique
    needed = {"SGD": {"momentum": 0.9}, "SOAP": {"one_sided": True}, "Layerwise": {"lr": 0.01}}.get(name, {})
    (_, checks) = parametrize(optimizer, **needed, **options).args
    words = "-".join([name, *options.values()])
    nightly = {"compiles": [pytest.mark.nightly]}
    marks = {each.id: [pytest.mark.slow, *nightly.get(each.id, [])] for each in checks}
    return [pytest.param(*each.values, id=f"{words}-{each.id}", marks=marks[each.id]) for each in checks]


def with_every_optimizer() -> list[Any]:
    found = []
    for place, (name, optimizer) in enumerate((OURS | OTHERS).items()):
        found += one_in(ONE_IN.get(name, 24), checks_for(name, optimizer), first=place)
    return found


def with_other_engines() -> list[Any]:
    """Every second check once by each engine, for one rule after the other."""
    found = []
    for place, (name, optimizer) in enumerate(OURS.items()):
        for engine, first in (("reference", place), ("foreach", place + 1)):
            found += one_in(2 * len(OURS), checks_for(name, optimizer, engine=engine), first=first)
    return found


@pytest.mark.parametrize("check", [*with_every_optimizer(), *with_other_engines()])
def test_ours_keep_what_users_rely_on(check: Callable[[], Any]) -> None:
    check()


@parametrize("thalweg.torch.AdamW", only="contract,numbers,state")
def test_adamw_keeps_it(check: Callable[[], Any]) -> None:
    """The same in `make test-fast`, where the test above is not."""
    check()
