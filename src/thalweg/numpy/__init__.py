"""Optimizers for raw numpy arrays: no framework, stepped in place, by name or all at once."""

from __future__ import annotations

from thalweg.numpy import optimizers
from thalweg.numpy.optimizer import Optimizer
from thalweg.numpy.optimizers import *  # noqa: F403
from thalweg.rules import Annealed

__all__ = [
    "Annealed",
    "Optimizer",
]
__all__ += optimizers.__all__
