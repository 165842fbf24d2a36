"""Every check of gradient transformations catches a faulty one and passes optax's and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from lanes import one_in, with_nightly

pytest.importorskip("optax")

from check_faulty_jax import FAULTS
from offered import NOT_OFFERED_BY_OPTAX, require_offers

from thalweg.check import parametrize
from thalweg.check.registry import checks_of
from thalweg.check.run import run_check
from thalweg.check.subject import Subject, subject_of
from thalweg.rules import RULES

pytestmark = pytest.mark.slow  # many small programs are compiled

CHECKS = checks_of("optax")


@functools.cache
def good(name: str) -> Subject:
    return subject_of(name, {"learning_rate": 0.01})


def test_every_check_has_a_faulty_transformation() -> None:
    assert set(FAULTS) == set(CHECKS)


@pytest.mark.parametrize("name", one_in(4, CHECKS))
def test_a_check_catches_its_fault(name: str) -> None:
    found = run_check(CHECKS[name], subject_of(FAULTS[name], {"learning_rate": 0.1}))
    assert found.outcome == "failed", found.seen
    assert found.seen


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_good_ones(name: str) -> None:
    found = run_check(CHECKS[name], good("optax:adamw"))
    assert found.outcome == "passed", found.seen


#: Rules that compile soon: every check has one of them in `make test`.
SOON = ("Lion", "SGD", "AdamW", "LAMB")


def checks_for(rule: str) -> list[Any]:
    """The checks of one of our functions, as parameters."""
    checks = parametrize(f"thalweg.optax:{rule.lower()}", learning_rate=0.01).args[1]
    checks = require_offers(checks, NOT_OFFERED_BY_OPTAX.get(rule.lower(), ()))
    named = [pytest.param(*each.values, id=f"{rule.lower()}-{each.id}") for each in checks]
    return one_in(len(SOON), named, first=SOON.index(rule)) if rule in SOON else [with_nightly(each) for each in named]


@pytest.mark.parametrize("check", [each for rule in RULES for each in checks_for(rule)])
def test_ours_keep_what_users_rely_on(check: Callable[[], Any]) -> None:
    check()
