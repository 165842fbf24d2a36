"""The checks as tests of pytest: ``pytest -p thalweg.check.plugin --optimizer torch.optim.AdamW``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.check.run import (
    FAILED,
    NOT_OFFERED,
    Check,
    Verdict,
    choose_checks,
    is_over_ranks,
    make_ranks,
    name_of,
    run_check,
    run_over_ranks,
    write_question,
)
from thalweg.check.subject import Subject, parse_json, subject_of, untried_subject
from thalweg.errors import CommandError
from thalweg.show.extras import extra

with extra("check"):
    import pytest

#: What a run has of pytest: none of its output, and nothing of what the user's own tests are set up with.
ARGUMENTS = f"-c {os.devnull} --rootdir . --noconftest --import-mode append --assert plain --capture no".split()
LEFT_OUT = [
    "cacheprovider",
    "terminal",
    "logging",
    "warnings",
    "faulthandler",
    "unraisableexception",
    "threadexception",
]
SURROUNDINGS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}


def pytest_addoption(parser: pytest.Parser) -> None:
    options = parser.getgroup("thalweg check")
    options.addoption("--optimizer", help="The optimizer to check, such as torch.optim.AdamW.")
    options.addoption("--options", metavar="JSON", help="Its options, such as '{\"lr\": 0.1}'.")
    options.addoption("--facts", metavar="JSON", help="What its author declares.")
    options.addoption("--check-ranks", metavar="N", type=int, default=0, help="Also the checks over N processes.")


def pytest_configure(config: pytest.Config) -> None:
    optimizer, ranks = config.getoption("optimizer"), config.getoption("check_ranks")
    if optimizer is None:
        return
    try:
        options, facts = (parse_json(config.getoption(name), f"--{name}") for name in ("options", "facts"))
        subject = subject_of(optimizer, options, facts)
        config.pluginmanager.register(Checks(subject, choose_checks(subject.kind, ranks=ranks), ranks))
    except CommandError as error:
        raise pytest.UsageError(str(error)) from error


class Checks:
    """A plugin: the tests are these checks, of one optimizer."""

    def __init__(
        self,
        subject: Subject,
        checks: Sequence[Check],
        ranks: int,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self.subject = subject
        self.checks = checks
        self.ranks = make_ranks(ranks)
        self.on_verdict = on_verdict
        if is_over_ranks(checks[-1]):
            write_question(checks[-1], subject)  # say before any check runs what cannot be sent

    def pytest_configure(self, config: pytest.Config) -> None:
        config.args = [f"{inspect.getfile(check)}::{check.__name__}" for check in self.checks]

    @pytest.fixture
    def s(self) -> Subject:
        """The optimizer that is checked."""
        return self.subject

    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        check, subject = pyfuncitem.obj, pyfuncitem.funcargs["s"]
        run = functools.partial(run_over_ranks, self.ranks) if is_over_ranks(check) else run_check
        verdict = run(check, subject)
        self.on_verdict(verdict)
        end_test(verdict)
        return True

    def pytest_unconfigure(self) -> None:
        self.ranks.end()


def end_test(verdict: Verdict) -> None:
    """End a test of pytest as its check did: it fails with the check's docstring and what was seen, or is skipped."""
    if verdict.outcome == FAILED:
        pytest.fail(f"{verdict.holds} Seen: {verdict.seen}", pytrace=False)
    if verdict.outcome == NOT_OFFERED:
        pytest.skip(verdict.seen)


@dataclass(frozen=True, kw_only=True)
class Report:
    """All verdicts on one optimizer."""

    subject: str
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
    **options: Any,
) -> Report:
    """Check an optimizer: a class, a function that makes one, or a reference such as ``torch.optim.AdamW``.

    Options are those of the optimizer. ``only`` names checks or groups; ``facts`` are what its author declares.
    With ``ranks``, the checks of replicas and shards of torch are run too, by so many processes.
    """
    subject = subject_of(optimizer, options, facts)
    return run_checks(subject, choose_checks(subject.kind, only, ranks), ranks)


def run_checks(
    subject: Subject, checks: Sequence[Check], ranks: int, on_verdict: Callable[[Verdict], None] = lambda _: None
) -> Report:
    """Run checks in this process, by pytest, and report what each of them says."""
    verdicts: list[Verdict] = []

    def note(verdict: Verdict) -> None:
        verdicts.append(verdict)
        on_verdict(verdict)

    arguments = [*ARGUMENTS, *(word for name in LEFT_OUT for word in ("-p", f"no:{name}"))]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SURROUNDINGS.items():
            patch.setenv(name, value)
        code = pytest.main(arguments, plugins=[Checks(subject, checks, ranks, note)])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if len(verdicts) != len(checks):
        raise RuntimeError(f"pytest ended with {code!r} after {len(verdicts)} of {len(checks)} checks")
    return Report(subject=subject.name, verdicts=verdicts)


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

    @functools.cache
    def subject() -> Subject:
        return subject_of(optimizer, options, facts)

    checks = choose_checks(untried_subject(optimizer, options, facts).kind, only)
    params = [
        pytest.param(lambda check=check: end_test(run_check(check, subject())), id=name_of(check)) for check in checks
    ]
    return pytest.mark.parametrize("check", params)
