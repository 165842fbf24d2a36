"""Our optimizers keep what `thalweg check` asks of anybody's: every rule, mixtures, and a rule of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import mixed
from lanes import one_in
from offered import BY_NONE, NOT_OFFERED, ON_GPU, require_offers, run_offered
from own_rules import Layerwise

import thalweg.torch
from thalweg.check import parametrize
from thalweg.check.registry import checks_of
from thalweg.rules import RULES

OURS = {rule: getattr(thalweg.torch, rule) for rule in RULES}
OTHERS = {each.__name__: each for each in (mixed.adamw_and_adafactor, mixed.muon_and_adamw, Layerwise)}
#: Groups of checks that `make test-fast` has too, of one rule. All others are in `make test`, for every rule.
FAST = {each.name for each in checks_of("torch").values() if each.group in ("contract", "numbers", "state")}
#: Checks of many steps: of the rules whose steps take longest they are left to the night.
LONG, SLOWEST = ("schedulers", "descends"), ("Kron", "SOAP")
#: Without momentum SGD has no state.
NEEDED: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Layerwise": {"lr": 0.01}}


def checks_for(name: str, optimizer: Any, **options: Any) -> list[Any]:
    """The checks of one optimizer as parameters."""
    (_, checks) = parametrize(optimizer, **NEEDED.get(name, {}), **options).args
    words = "-".join([name, *options.values()])
    found = []
    for each in require_offers(checks, BY_NONE | ON_GPU | NOT_OFFERED[name]):
        marks = [] if name == "LAMB" and not options and each.id in FAST else [pytest.mark.slow]
        is_long = each.id == "compiles" or (name in SLOWEST and each.id in LONG)
        marks += [pytest.mark.nightly] if is_long else []
        found.append(pytest.param(*each.values, id=f"{words}-{each.id}", marks=marks))
    return found


def with_every_optimizer() -> list[Any]:
    return [each for name, optimizer in (OURS | OTHERS).items() for each in checks_for(name, optimizer)]


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


def test_what_is_not_offered_any_more_is_red() -> None:
    with pytest.raises(pytest.fail.Exception, match="scalars is not offered any more: only matrices"):
        run_offered("scalars", lambda: pytest.skip("only matrices are taken"), {"odd"})
    with pytest.raises(pytest.skip.Exception, match="not declared"):
        run_offered("odd", lambda: pytest.skip("not declared"), {"odd"})
    with pytest.raises(pytest.fail.Exception, match="odd is offered, and listed"):
        run_offered("odd", lambda: None, {"odd"})
    run_offered("scalars", lambda: None, {"odd"})
