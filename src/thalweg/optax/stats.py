"""Figures that a step computes anyway, kept in the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import optax

from thalweg.errors import OptionError, StateError
from thalweg.optax.states import StatsState
from thalweg.optax.steps import owner_of
from thalweg.optax.transformation import Transformation
from thalweg.optax.trees import Tree


def with_stats(solver: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state also has the figures that its steps compute anyway, such as trust ratios.

    Wrappers of optax go around it: ``optax.chain(optax.clip(1.0), with_stats(lamb(1e-3)))``. ``stats(state)`` reads.
    """
    owner = owner_of(solver)
    if not isinstance(owner, Transformation) or owner.observed:
        raise OptionError(
            "with_stats() takes a transformation of thalweg.optax itself: put wrappers of optax around with_stats(), "
            "and give mixture() entries that have it"
        )
    return replace(owner, observed=True).transformation


def stats(state: Tree) -> dict[str, dict[str, Any]]:
    """The figures in the state of ``with_stats``, by parameter and name; reading them waits for the device.

    state: whatever wrappers of optax are around it.

    >>> import jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> solver, params = with_stats(lamb(0.1)), {"w": jnp.ones((2, 2))}
    >>> updates, state = solver.update(params, solver.init(params), params)
    >>> round(stats(state)["w"]["trust_ratio"], 3)
    1.0
    """
    observed = [part for part in jax.tree.leaves(state, is_leaf=is_observed) if is_observed(part)]
    if not observed:
        raise StateError("this state has no figures: make it with init() of with_stats(solver)")
    by_name = jax.device_get({name: figures for part in observed for name, figures in part.stats.items()})
    return {
        name: {key: value.item() if value.size == 1 else value for key, value in figures.items()}
        for name, figures in by_name.items()
    }


def is_observed(part: Any) -> bool:
    return isinstance(part, StatsState)
