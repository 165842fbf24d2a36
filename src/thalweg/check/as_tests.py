"""Checks as tests of pytest: one test a check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from thalweg.check.references import subject_of
from thalweg.check.registry import Check, chosen_checks
from thalweg.check.verdicts import FAILED, NOT_OFFERED, verdict_of


def parametrize(
    optimizer: Any, *, only: str | None = None, facts: Mapping[str, Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a test with an argument ``check``, which is called with the name of each check in turn.

    >>> import torch
    >>> @parametrize(torch.optim.AdamW, lr=0.1)
    ... def test_my_optimizer(check):
    ...     check()
    """
    import pytest

    subject = subject_of(optimizer, options, facts)

    def calling(each: Check) -> Callable[[], None]:
        def call() -> None:
            verdict = verdict_of(each, subject)
            if verdict.outcome == FAILED:
                pytest.fail(f"{each.holds} Seen: {verdict.seen}", pytrace=False)
            if verdict.outcome == NOT_OFFERED:
                pytest.skip(verdict.seen)

        return call

    checks = chosen_checks(subject.kind, only)
    return pytest.mark.parametrize("check", [pytest.param(calling(each), id=each.name) for each in checks])
