"""Optimizers for torch: drop-in replacements for those of ``torch.optim``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thalweg.rules import RULES, Annealed
from thalweg.torch.backward import InBackward, step_in_backward
from thalweg.torch.base import Optimizer
from thalweg.torch.mixture import Mixture
from thalweg.torch.optimizers import LAMB, LARS, SGD, Adafactor, AdamW, Kron, Lion, Muon, optimizer
from thalweg.torch.params.exchange import export_state, import_state
from thalweg.torch.params.explain import Explanation
from thalweg.torch.peers.exports import export_peer
from thalweg.torch.peers.imports import import_peer
from thalweg.torch.recipes import kron_adamw, muon_adamw

if not TYPE_CHECKING:  # a rule of the package needs no entry here
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "AdamW",
    "Annealed",
    "Explanation",
    "InBackward",
    "Kron",
    "Lion",
    "Mixture",
    "Muon",
    "Optimizer",
    "export_peer",
    "export_state",
    "import_peer",
    "import_state",
    "kron_adamw",
    "muon_adamw",
    "optimizer",
    "step_in_backward",
]
