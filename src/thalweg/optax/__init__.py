"""Optimizers for JAX, as gradient transformations of optax."""

from __future__ import annotations

import importlib
from typing import Any

from thalweg.optax import functions
from thalweg.optax.averages import averaged
from thalweg.optax.exchange import export_state, import_state
from thalweg.optax.explain import explain
from thalweg.optax.functions import *  # noqa: F403
from thalweg.optax.layouts import state_specs
from thalweg.optax.matrices import MatrixAxes
from thalweg.optax.mixture import mixture
from thalweg.optax.peers import import_peer
from thalweg.optax.recipes import muon_adamw
from thalweg.optax.states import AdafactorState, KronState, LambState, LarsState, MixtureState, MuonState, StatsState
from thalweg.optax.stats import stats, with_stats
from thalweg.optax.steps import make_step
from thalweg.rules import Annealed

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
    "averaged",
    "explain",
    "export_state",
    "import_peer",
    "import_state",
    "make_step",
    "mixture",
    "muon_adamw",
    "state_specs",
    "stats",
    "with_stats",
]
__all__ += functions.__all__


def __getattr__(name: str) -> Any:
    """``audit``, which is loaded when it is used: it stands above this front end."""
    if name == "audit":
        return importlib.import_module("thalweg.audit.optax").audit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
