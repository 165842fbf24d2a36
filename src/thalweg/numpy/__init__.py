"""Optimizers for raw numpy arrays: no framework, stepped in place, by name or all at once."""

from __future__ import annotations

from thalweg.numpy.optimizer import Optimizer
from thalweg.numpy.optimizers import LAMB, LARS, Adafactor, Kron
from thalweg.rules import Annealed

__all__ = ["LAMB", "LARS", "Adafactor", "Annealed", "Kron", "Optimizer"]
