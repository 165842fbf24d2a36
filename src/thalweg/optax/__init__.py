"""Optimizers for JAX, as gradient transformations of optax."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thalweg.optax.exchange import export_state, import_state
from thalweg.optax.explain import explain
from thalweg.optax.layouts import state_specs
from thalweg.optax.made import function_of, transformation
from thalweg.optax.matrices import MatrixAxes
from thalweg.optax.mixture import mixture
from thalweg.optax.optimizers import adafactor, kron, lamb, lars, muon
from thalweg.optax.peers import import_peer
from thalweg.optax.recipes import muon_adamw
from thalweg.optax.states import AdafactorState, KronState, LambState, LarsState, MixtureState, MuonState
from thalweg.optax.stats import StatsState, stats, with_stats
from thalweg.rules import RULES, Annealed

if TYPE_CHECKING:
    from thalweg.optax.typed import adamw as adamw
    from thalweg.optax.typed import lion as lion
    from thalweg.optax.typed import sgd as sgd
else:
    globals().update({name.lower(): function_of(rule) for name, rule in RULES.items() if name.lower() not in globals()})

__all__ = [
    "AdafactorState",
    "Annealed",
    "KronState",
    "LambState",
    "LarsState",
    "MatrixAxes",
    "MixtureState",
    "MuonState",
    "StatsState",
    "adafactor",
    "adamw",
    "explain",
    "export_state",
    "import_peer",
    "import_state",
    "kron",
    "lamb",
    "lars",
    "lion",
    "mixture",
    "muon",
    "muon_adamw",
    "sgd",
    "state_specs",
    "stats",
    "transformation",
    "with_stats",
]
