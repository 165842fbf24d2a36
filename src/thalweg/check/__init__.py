"""The check: does an optimizer of any library keep what users rely on?

``thalweg.check.check`` runs all checks and returns a report; ``thalweg check`` shows it; ``parametrize`` makes one
test of pytest a check.
"""

from __future__ import annotations

from thalweg.check.plugin import Report, check, parametrize
from thalweg.check.run import Verdict

__all__ = ["Report", "Verdict", "check", "parametrize"]
