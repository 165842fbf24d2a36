"""Every check of gradient transformations catches a faulty one and passes optax's and ours."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("optax")

from check_faulty_jax import FAULTS
from offered import NOT_OFFERED_BY_OPTAX, assert_keeps

from thalweg.check import check
from thalweg.check.plugin import checks_of, names_of
from thalweg.rules import RULES

pytestmark = pytest.mark.slow  # many small programs are compiled

CHECKS = [names_of(each)[0] for each in checks_of("optax")]


def test_every_check_has_a_faulty_transformation() -> None:
    assert set(FAULTS) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_catches_its_fault(name: str) -> None:
    (verdict,) = check(FAULTS[name], only=name, learning_rate=0.1).verdicts
    assert verdict.outcome == "failed"
    assert verdict.seen


def test_checks_pass_a_good_transformation() -> None:
    assert_keeps(check("optax:adamw", learning_rate=0.01), ())


#: By day, what concerns trees, wrappers and transformations of jax is checked of one rule of each kind, and what the
#: mathematics of a rule could break of every rule; of those that compile for half a minute, what compiles once.
EACH_KIND = ("LAMB", "Adafactor", "Muon")
LONG = {"Kron": "descends,empty-trees,misspelt-option", "SOAP": "compiled-once,empty-trees,misspelt-option"}
FEW = "step-moves-parameters,state-keeps-its-form,compiled-once,descends,zero-gradients,bfloat16-moves,nan-stays-local,"
FEW += "empty-trees,misspelt-option"


@pytest.mark.parametrize("rule", RULES)
def test_ours_keep_what_users_rely_on(rule: str) -> None:
    only = LONG.get(rule, None if rule in EACH_KIND else FEW) if "THALWEG_TESTS_SOON" in os.environ else None
    report = check(f"thalweg.optax:{rule.lower()}", only=only, learning_rate=0.01)
    assert_keeps(report, NOT_OFFERED_BY_OPTAX.get(rule.lower(), ()))
