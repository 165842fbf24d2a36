"""Optimizers for JAX, as gradient transformations of optax."""

from __future__ import annotations

from thalweg.optax.exchange import export_state, import_state
from thalweg.optax.layouts import state_specs
from thalweg.optax.optimizers import adafactor, kron, lamb, lars
from thalweg.optax.states import AdafactorState, KronState, LambState, LarsState
from thalweg.rules import Annealed

__all__ = [
    "AdafactorState",
    "Annealed",
    "KronState",
    "LambState",
    "LarsState",
    "adafactor",
    "export_state",
    "import_state",
    "kron",
    "lamb",
    "lars",
    "state_specs",
]
