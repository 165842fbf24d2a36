"""Every check of gradient transformations catches a faulty one and passes optax's and ours."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import optax
import pytest
from check_faulty_jax import FAULTS
from day import BY_DAY
from offered import NOT_OFFERED_BY_OPTAX, assert_keeps

import thalweg.optax
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


#: By day, what concerns trees, wrappers and transformations of jax is checked of one rule, and what the mathematics of
#: a rule could break of every other, under jit: operation by operation, Kron alone compiles hundreds of programs.
FEW = "step-moves-parameters,state-keeps-its-form,compiled-once,descends,zero-gradients,bfloat16-moves,nan-stays-local,"
FEW += "empty-trees,misspelt-option"


def by_jit(name: str) -> Any:
    """A function of ours whose transformations are compiled, once for all checks."""

    @cache
    def compiled(learning_rate: float, **options: Any) -> optax.GradientTransformationExtraArgs:
        made = getattr(thalweg.optax, name)(learning_rate, **options)
        return optax.GradientTransformationExtraArgs(jax.jit(made.init), jax.jit(made.update))

    return compiled


@pytest.mark.parametrize("rule", RULES)
def test_ours_keep_what_users_rely_on(rule: str) -> None:
    name = rule.lower()
    is_short = BY_DAY and rule != "LAMB"
    subject, only = (by_jit(name), FEW) if is_short else (f"thalweg.optax:{name}", None)
    report = check(subject, only=only, learning_rate=0.01)
    not_offered = NOT_OFFERED_BY_OPTAX.get(name, set())
    assert_keeps(report, not_offered & {each.check for each in report.verdicts})
