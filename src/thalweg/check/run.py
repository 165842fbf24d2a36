"""Run checks and report what each of them says; or make each a test of pytest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from thalweg.check.registry import Check, Failed, NotOffered, choose_checks
from thalweg.check.subject import Subject, keep_surroundings, subject_of, untried_subject
from thalweg.show.modules import describe_error

PASSED, FAILED, NOT_OFFERED = "passed", "failed", "not offered"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a check says of an optimizer."""

    check: str
    group: str
    holds: str
    #: ``passed``, ``failed`` or ``not offered``.
    outcome: str
    #: What was seen where it failed, or why it is not offered.
    seen: str = ""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts on one optimizer."""

    subject: str
    options: Mapping[str, Any]
    verdicts: list[Verdict]

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == FAILED]


def check(
    optimizer: Any,
    *,
    only: str | None = None,
    ranks: int = 0,
    facts: Mapping[str, Any] | None = None,
    on_verdict: Callable[[Verdict], None] = lambda _: None,
    **options: Any,
) -> Report:
    """Check an optimizer: a class, a function that makes one, or a reference such as ``torch.optim.AdamW``.

    Options are those of the optimizer. ``only`` names checks or groups; ``facts`` are what its author declares.
    With ``ranks``, the checks of replicas and shards of torch are run too, by so many processes.
    """
    from thalweg.check.world import World, write_question

    subject = subject_of(optimizer, options, facts)
    checks = choose_checks(subject.kind, only, ranks)
    if checks[-1].over_ranks:
        write_question(checks[-1], optimizer, options, facts)  # say before any check runs what cannot be sent
    verdicts = []
    with World(ranks) as world:
        for each in checks:
            if each.over_ranks:
                verdict = world.verdict(each, optimizer, options, facts)
            else:
                verdict = run_check(each, subject)
            verdicts.append(verdict)
            on_verdict(verdict)
    return Report(subject=subject.name, options=subject.options, verdicts=verdicts)


def run_check(check: Check, subject: Subject) -> Verdict:
    with keep_surroundings(subject.kind):
        try:
            check.run(subject)
        except NotOffered as why:
            return judge(check, NOT_OFFERED, str(why))
        except Failed as what:
            return judge(check, FAILED, str(what))
        except Exception as error:
            return judge(check, FAILED, describe_error(error))
    return judge(check, PASSED)


def judge(check: Check, outcome: str, seen: str = "") -> Verdict:
    return Verdict(check=check.name, group=check.group, holds=check.holds, outcome=outcome, seen=seen)


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

    def assert_holds(each: Check) -> None:
        verdict = run_check(each, subject())
        if verdict.outcome == FAILED:
            pytest.fail(f"{each.holds} Seen: {verdict.seen}", pytrace=False)
        if verdict.outcome == NOT_OFFERED:
            pytest.skip(verdict.seen)

    checks = choose_checks(untried_subject(optimizer, options, facts).kind, only)
    params = [pytest.param(functools.partial(assert_holds, each), id=each.name) for each in checks]
    return pytest.mark.parametrize("check", params)
