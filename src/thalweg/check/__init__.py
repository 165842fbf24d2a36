"""The check: does an optimizer of any library keep what users rely on?

``thalweg.check.check`` runs all checks and returns a report; ``thalweg check`` shows it; ``parametrize`` makes one
test of pytest a check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thalweg.check.registry import Check, Failed, NotOffered, checks_of
from thalweg.check.run import Report, check, parametrize
from thalweg.check.subject import Facts, Subject
from thalweg.check.verdicts import Verdict

if TYPE_CHECKING:
    CHECKS: dict[str, Check]

__all__ = ["CHECKS", "Check", "Facts", "Failed", "NotOffered", "Report", "Subject", "Verdict", "check", "parametrize"]


def __getattr__(name: str) -> Any:
    if name != "CHECKS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return checks_of("torch")
