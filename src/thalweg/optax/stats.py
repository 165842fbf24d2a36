"""Figures that a step computes anyway, kept in the state."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from thalweg.errors import OptionError, StateError
from thalweg.optax.steps import owner_of
from thalweg.optax.transformation import Transformation
from thalweg.optax.trees import Tree, parameters
from thalweg.spaces.jax import replicated_with


class StatsState(NamedTuple):
    #: The state of the transformation itself.
    inner_state: Any
    #: Figures of the last step, by parameter and name; zeros before the first.
    stats: dict[str, dict[str, Any]]


class Observed(Transformation):
    """A transformation whose state has the figures too."""

    def init(self, params: Tree) -> StatsState:
        inner = super().init(params)
        _, _, stats = jax.eval_shape(self.step_with_figures, params, inner, params)
        # beside the parameters from the start, like the count of steps
        zeros = partial(jnp.zeros, device=replicated_with(parameters(params).leaves[0])) if stats else jnp.zeros
        return StatsState(inner, jax.tree.map(lambda x: zeros(x.shape, x.dtype), stats))

    def step(
        self, updates: Tree, state: Any, params: Tree, *, applied: bool = False, observed: bool = True
    ) -> tuple[Tree, Any, dict[str, Any]]:
        if not isinstance(state, StatsState):
            raise StateError(f"with_stats() needs a state of its own init(), got one of {type(state).__name__}")
        values, inner, stats = self.step_with_figures(updates, state.inner_state, params, applied=applied)
        return values, StatsState(inner, stats), stats

    def step_with_figures(
        self, updates: Tree, state: Any, params: Tree, *, applied: bool = False
    ) -> tuple[Tree, Any, dict[str, Any]]:
        values, inner, stats = super().step(updates, state, params, applied=applied, observed=True)
        return values, inner, jax.tree.map(as_figure, stats)


def as_figure(x: Any) -> Any:
    """One number, or one for each tensor of a stack, with a dtype that no compiled step changes."""
    return jnp.squeeze(jnp.asarray(x, jnp.result_type(x)))


def with_stats(solver: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """A transformation whose state also has the figures that its steps compute anyway, such as trust ratios.

    Wrappers of optax go around it: ``optax.chain(optax.clip(1.0), with_stats(lamb(1e-3)))``. ``stats(state)`` reads.
    """
    owner = owner_of(solver)
    if type(owner) is not Transformation:
        raise OptionError(
            "with_stats() takes a transformation of thalweg.optax itself: put wrappers of optax around with_stats(), "
            "and give mixture() entries that have it"
        )
    observed = Observed(owner.settings, owner.learning_rate, owner.choices, owner.specs, owner.engine, owner.layout)
    return optax.GradientTransformationExtraArgs(observed.init, observed.update)


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
