"""Optimizers for torch: drop-in replacements for those of ``torch.optim``."""

from __future__ import annotations

from thalweg.rules import Annealed
from thalweg.torch.backward import InBackward, step_in_backward
from thalweg.torch.optimizer import Optimizer
from thalweg.torch.optimizers import LAMB, LARS, Adafactor, Kron
from thalweg.torch.params.exchange import export_state, import_state
from thalweg.torch.params.explain import Explanation

__all__ = [
    "LAMB",
    "LARS",
    "Adafactor",
    "Annealed",
    "Explanation",
    "InBackward",
    "Kron",
    "Optimizer",
    "export_state",
    "import_state",
    "step_in_backward",
]
