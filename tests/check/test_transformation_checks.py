"""Every check of gradient transformations catches a faulty one and passes optax's and ours."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("optax")

from check_faulty_jax import FAULTS

from thalweg.check import check
from thalweg.check.references import subject_of
from thalweg.check.registry import checks_of
from thalweg.check.subject import Subject
from thalweg.check.verdicts import verdict_of
from thalweg.rules import RULES

CHECKS = checks_of("optax")


@functools.cache
def good(name: str) -> Subject:
    return subject_of(name, {"learning_rate": 0.01})


def test_every_check_has_a_faulty_transformation() -> None:
    assert set(FAULTS) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_catches_its_fault(name: str) -> None:
    found = verdict_of(CHECKS[name], subject_of(FAULTS[name], {"learning_rate": 0.1}))
    assert found.outcome == "failed", found.seen
    assert found.seen


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_good_ones(name: str) -> None:
    found = verdict_of(CHECKS[name], good("optax:adamw"))
    assert found.outcome == "passed", found.seen


@pytest.mark.nightly
@pytest.mark.parametrize("rule", RULES)
def test_ours_have_no_failure(rule: str) -> None:
    assert not (found := check(f"thalweg.optax:{rule.lower()}", learning_rate=0.01).failed), found
