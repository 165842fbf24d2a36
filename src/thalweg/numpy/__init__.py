"""Optimizers for raw numpy arrays: no framework, stepped in place, by name or all at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thalweg.numpy.base import Optimizer
from thalweg.numpy.mixture import Mixture
from thalweg.numpy.optimizers import LAMB, LARS, SGD, Adafactor, AdamW, Kron, Lion, Muon, optimizer
from thalweg.rules import RULES, Annealed

if not TYPE_CHECKING:  # a rule of the package needs no entry here
    globals().update({name: optimizer(rule) for name, rule in RULES.items()})

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "AdamW",
    "Annealed",
    "Kron",
    "Lion",
    "Mixture",
    "Muon",
    "Optimizer",
    "optimizer",
]
