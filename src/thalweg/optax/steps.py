"""Steps that answer with new parameters, and write them where the old ones were."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax

from thalweg.errors import ParameterError
from thalweg.optax.states import Entries
from thalweg.optax.trees import Tree


class Outcome(NamedTuple):
    """What comes of a step of one parameter."""

    #: Its change, or the new parameter.
    value: Any
    state: Entries
    stats: Mapping[str, Any]


class Solver(ABC):
    """The owner of the functions of a gradient transformation, which has steps of its own."""

    @property
    def transformation(self) -> optax.GradientTransformationExtraArgs:
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    @abstractmethod
    def init(self, params: Tree) -> Any:
        """The state before the first step."""

    @abstractmethod
    def step(self, params: Tree, state: Any, gradients: Tree, *, applied: bool, **extra_args: Any) -> tuple[Tree, Any]:
        """Changes of the parameters, or the new parameters if they are applied; and the new state."""

    def update(self, updates: Tree, state: Any, params: Tree = None, **extra_args: Any) -> tuple[Tree, Any]:
        if params is None:
            raise ParameterError("update() needs the parameters: update(gradients, state, params)")
        return self.step(params, state, updates, applied=False, **extra_args)

    def apply(self, params: Tree, state: Any, gradients: Tree, **extra_args: Any) -> tuple[Tree, Any]:
        return self.step(params, state, gradients, applied=True, **extra_args)

    def reached(self) -> set[int]:
        """The ids of the owners of the steps that it takes."""
        return {id(self)}


def make_step(solver: optax.GradientTransformation) -> Callable[..., tuple[Tree, Any]]:
    """A function ``step(params, state, gradients)`` that answers with the new parameters and the new state.

    solver: any gradient transformation. Those of thalweg.optax run native code where they can, and round 16-bit
    parameters once; for others it is ``solver.update`` and ``optax.apply_updates``. Compile it, alone or within
    a training step, and donate parameters and state, so that they are written in place: jit matches what is donated
    with results by their order, which is the same here.

    >>> import jax, jax.numpy as jnp
    >>> from thalweg.optax import lamb
    >>> solver, params = lamb(0.1), {"w": jnp.ones((2, 2))}
    >>> step = jax.jit(make_step(solver), donate_argnums=(0, 1))
    >>> params, state = step(params, solver.init(params), {"w": jnp.full((2, 2), 0.5)})
    >>> print(params["w"])
    [[0.9 0.9]
     [0.9 0.9]]
    """
    owner = owner_of(solver)
    return step_by_update(solver) if owner is None else owner.apply


def owner_of(solver: optax.GradientTransformation) -> Solver | None:
    owner = getattr(solver.update, "__self__", None)
    return owner if isinstance(owner, Solver) else None


def step_by_update(solver: optax.GradientTransformation) -> Callable[..., tuple[Tree, Any]]:
    update = optax.with_extra_args_support(solver).update

    def step(params: Tree, state: Any, gradients: Tree, **extra_args: Any) -> tuple[Tree, Any]:
        updates, state = update(gradients, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step
