"""The check: does an optimizer of any library keep what users rely on?

``thalweg.check.check`` runs all checks and returns a report; ``thalweg check`` shows it.
"""

from __future__ import annotations

from thalweg.check.plugin import Report, Verdict, check

__all__ = ["Report", "Verdict", "check"]
