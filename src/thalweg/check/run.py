"""Run checks, and keep what each of them said; or make each a test of pytest."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thalweg.check.references import subject_of, untried_subject
from thalweg.check.registry import Check, choose_checks
from thalweg.check.subject import Subject
from thalweg.check.verdicts import CONSTRUCTION, FAILED, NOT_OFFERED, Verdict, run_check
from thalweg.show.devices import versions


@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts of one optimizer."""

    subject: str
    options: Mapping[str, Any]
    versions: Mapping[str, str]
    #: What the caller declared, added to what the optimizer declares.
    facts: Mapping[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def failed(self) -> list[Verdict]:
        return [each for each in self.verdicts if each.outcome == FAILED]

    @property
    def counts(self) -> Counter[str]:
        return Counter(each.outcome for each in self.verdicts)

    def plain(self) -> dict[str, Any]:
        return {**asdict(self), "counts": dict(self.counts)}


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
    subject = subject_of(optimizer, options, facts)
    package = str(getattr(subject.factory, "__module__", "")).partition(".")[0]
    found = Report(
        subject=subject.name,
        options=subject.options,
        versions=versions(dict.fromkeys((package, "thalweg", subject.kind))),
        facts=dict(facts or {}),
    )
    checks = choose_checks(subject.kind, only, ranks=ranks > 0)
    together = [each for each in checks if each.kind == "ranks"]
    if together:
        from thalweg.check.world import World, write_question

        write_question(together[0], optimizer, options, facts)  # what cannot be sent is said before anything has run
    for each in checks[: len(checks) - len(together)]:  # those of ranks come last
        found.verdicts.append(run_check(each, subject))
        on_verdict(found.verdicts[-1])
    if together:
        with World(ranks) as world:
            for each in together:
                found.verdicts.append(world.verdict(each, optimizer, options, facts))
                on_verdict(found.verdicts[-1])
    return found


def report_unconstructed(reference: str, error: Exception) -> Report:
    """The report of an optimizer that cannot be constructed: one verdict, with the reason."""
    verdict = Verdict(
        check=CONSTRUCTION,
        group=CONSTRUCTION,
        holds="The optimizer can be constructed with its options, and steps a matrix.",
        outcome=FAILED,
        seen=str(error),
    )
    return Report(subject=reference, options={}, versions={}, verdicts=[verdict])


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
