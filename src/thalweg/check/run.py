"""Run checks and report what each of them says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from thalweg.check.plugin import FAILED, Check, Tests, Verdict, choose_checks, make_world
from thalweg.check.ranks import Ranks
from thalweg.check.subject import Subject, subject_of

#: What a run has of pytest: none of its output, and nothing that the user's own tests are set up with.
ARGUMENTS = f"""-c {os.devnull} --rootdir . --noconftest --import-mode append --assert plain --capture no
    -p no:cacheprovider -p no:terminal -p no:logging -p no:warnings -p no:faulthandler
    -p no:unraisableexception -p no:threadexception"""
SURROUNDINGS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}


class Report(NamedTuple):
    """All verdicts on one optimizer."""

    subject: str
    verdicts: list[Verdict]

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.outcome == FAILED]


def check(
    optimizer: Any, *, only: str | None = None, ranks: int = 0, facts: Mapping[str, Any] | None = None, **options: Any
) -> Report:
    """Check an optimizer: a class, a function that makes one, or a reference such as ``torch.optim.AdamW``.

    Options are those of the optimizer. ``only`` names checks or groups; ``facts`` are what its author declares.
    With ``ranks``, the checks of replicas and shards of torch are run too, by so many processes.
    """
    subject = subject_of(optimizer, options, facts)
    checks = choose_checks(subject.kind, only, ranks)
    with closing(make_world(ranks)) as world:
        return run_checks(subject, checks, world)


def run_checks(subject: Subject, checks: Sequence[Check], world: Ranks) -> Report:
    """Run checks by pytest in this process, and report what each of them says."""
    tests = Tests(subject, checks, world)
    with patch.dict(os.environ, SURROUNDINGS):
        code = pytest.main(ARGUMENTS.split(), plugins=[tests])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if len(tests.verdicts) != len(checks):
        raise RuntimeError(f"pytest ended with {code!r} after {len(tests.verdicts)} of {len(checks)} checks")
    return Report(subject.name, tests.verdicts)
