"""Optimizers for torch: drop-in replacements for those of ``torch.optim``."""

from __future__ import annotations

import importlib
from typing import Any

from thalweg.explain import Explanation
from thalweg.rules import Annealed
from thalweg.torch import optimizers
from thalweg.torch.backward import InBackward, step_in_backward
from thalweg.torch.base import Optimizer
from thalweg.torch.exchange import export_state, import_state
from thalweg.torch.mixture import Mixture
from thalweg.torch.optimizers import *  # noqa: F403
from thalweg.torch.peers import import_peer
from thalweg.torch.recipes import kron_adamw, muon_adamw

__all__ = [
    "Annealed",
    "Explanation",
    "InBackward",
    "Mixture",
    "Optimizer",
    "export_state",
    "import_peer",
    "import_state",
    "kron_adamw",
    "muon_adamw",
    "step_in_backward",
]
__all__ += optimizers.__all__


def __getattr__(name: str) -> Any:
    """``audit``, which is loaded when it is used: it stands above this front end."""
    if name == "audit":
        return importlib.import_module("thalweg.audit.torch").audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
