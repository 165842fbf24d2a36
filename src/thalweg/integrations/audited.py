"""An audit of one step of a trainer, by its number: what callbacks of trainers are made of."""

from __future__ import annotations

import importlib
import logging
from typing import Any

from thalweg.audit.report import AuditError

LOG = logging.getLogger("thalweg")


class ChosenStep:
    """Audits step ``step``, counted from 1, and logs the report. check: raise if it is not the step of its page."""

    def __init__(self, step: int = 1, *, check: bool = False, **options: Any) -> None:
        self.step, self.check, self.options = step, check, options
        self.audit: Any = None
        self.report: Any = None
        #: How many steps were seen to end.
        self.taken = 0

    def begin(self, optimizer: Any, model: Any, step: int) -> None:
        """To be called before each step, with its number: begins the audit if it is the one."""
        if step == self.step and self.audit is None and self.report is None:
            self.audit = importlib.import_module("thalweg.audit.torch").Audit(optimizer, model, **self.options)
            self.audit.__enter__()

    def end(self) -> None:
        """To be called after each step. A step that could not be audited ends no run, unless ``check`` is set."""
        self.taken += 1
        audit, self.audit = self.audit, None
        if audit is None:
            return
        try:
            audit.__exit__(None, None, None)
        except AuditError as error:
            if self.check:
                raise
            LOG.warning("step %d was not audited: %s", self.step, error)
            return
        self.report = audit
        LOG.log(logging.WARNING if audit.findings else logging.INFO, "step %d: %s", self.step, audit)
        if self.check:
            audit.check()
