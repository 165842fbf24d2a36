"""Optimizers in torchtitan: ``--override.imports thalweg.integrations.torchtitan.optimizers``.

Then a ``ParamGroupConfig`` may name ``thalweg.LAMB``, or ``module:MyRule`` for a rule of one's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from thalweg.errors import OptionError
from thalweg.integrations.audited import ChosenStep
from thalweg.rules import RULES
from thalweg.torch import optimizer

PREFIX = "thalweg."


class ThalwegOptimizers(OptimizersContainer):
    """torchtitan's optimizers, with those of thalweg among them.

    ``ThalwegOptimizers.audit_step = 1`` audits that step of a run, counted from 1, and logs the report.
    """

    audit_step: ClassVar[int | None] = None
    _chosen: ChosenStep | None = None

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Names of optimizers may be those of thalweg."""

    def step(self, *args: Any, **named: Any) -> None:
        if self.audit_step is None:
            super().step(*args, **named)
            return
        self._chosen = self._chosen or ChosenStep(self.audit_step)
        self._chosen.begin(self.optimizers, None, self._chosen.taken + 1)
        super().step(*args, **named)
        self._chosen.end()

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., Any]:
        module, colon, attribute = name.partition(":")
        if colon:
            return optimizer(getattr(importlib.import_module(module), attribute))
        if not name.startswith(PREFIX):
            factory: Callable[..., Any] = OptimizersContainer._resolve_optimizer_factory(name)
            return factory
        if name.removeprefix(PREFIX) not in RULES:
            raise OptionError(f"there is no optimizer {name!r}; there are {', '.join(PREFIX + rule for rule in RULES)}")
        return optimizer(RULES[name.removeprefix(PREFIX)])


@override(target=OptimizersContainer.Config, description="optimizers of thalweg by name")
def optimizers(config: OptimizersContainer.Config) -> OptimizersContainer.Config:
    """A configuration of optimizers in which names of thalweg are known."""
    return derive(config, ThalwegOptimizers.Config)
