"""The audit: is one live step of an optimizer, from any library, the step of the page that it is named after?

``thalweg.torch.audit`` and ``thalweg.optax.audit`` replay the step in float64 and return a report.
"""

from __future__ import annotations

from thalweg.audit.explanations import AS_PAGE
from thalweg.audit.report import AuditError, Line, Report

__all__ = ["AS_PAGE", "AuditError", "Line", "Report"]
