"""Checks as tests of pytest: one test a check."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from thalweg.check.references import subject_of, untried_subject
from thalweg.check.registry import Check, choose_checks
from thalweg.check.subject import Subject
from thalweg.check.verdicts import FAILED, NOT_OFFERED, run_check


def parametrize(
    optimizer: Any, *, only: str | None = None, facts: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test with an argument ``check``: one test for each check, which it calls.

    Nothing is constructed before the first of them runs.

    >>> import torch
    >>> @parametrize(torch.optim.AdamW, lr=0.1)
    ... def test_my_optimizer(check):
    ...     check()
    """
    import pytest

    @functools.cache
    def subject() -> Subject:
        return subject_of(optimizer, options, facts)

    def bind(each: Check) -> Callable[[], None]:
        def call() -> None:
            verdict = run_check(each, subject())
            if verdict.outcome == FAILED:
                pytest.fail(f"{each.holds} Seen: {verdict.seen}", pytrace=False)
            if verdict.outcome == NOT_OFFERED:
                pytest.skip(verdict.seen)

        return call

    checks = choose_checks(untried_subject(optimizer, options, facts).kind, only)
    return pytest.mark.parametrize("check", [pytest.param(bind(each), id=each.name) for each in checks])
