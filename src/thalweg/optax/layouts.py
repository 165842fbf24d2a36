"""How state is sharded when its parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from thalweg.optax.states import STATES, KronState
from thalweg.optax.trees import Tree, by_spec, named

Spec = jax.sharding.PartitionSpec


def state_specs(state: Tree, params: Tree, specs: Tree) -> Tree:
    """The PartitionSpecs of an optimizer's state, from those of the parameters.

    state: the state, real or from ``jax.eval_shape(solver.init, params)``; wrappers of optax may be around it.
    specs: a tree of PartitionSpec with the structure of params, or a prefix of it.

    State of the parameter's shape is sharded like it. Row and column averages follow the axis that is left, Kron's
    factors the stack they are in, and single numbers are everywhere.
    """
    found = named(params)
    own = {
        tuple(path): (tuple(p.shape), padded(spec, len(p.shape)))
        for path, p, spec in zip(found.paths, found.leaves, by_spec(specs, params), strict=True)
    }

    def of_leaf(path: Sequence[Any], leaf: Any) -> Spec:
        """By the parameter whose path is the end of the leaf's."""
        for start in range(len(path) + 1):
            if tuple(path[start:]) in own:
                return followed(tuple(leaf.shape), *own[tuple(path[start:])])
        return Spec()

    def of_factors(state: KronState) -> KronState:
        """Factors follow the axes of a stack, whose shape is that of their norms."""

        def of_factor(path: Sequence[Any], leaf: Any, stacked: int) -> Spec:
            known = own.get(tuple(path[:-1]))
            return Spec(*known[1][:stacked]) if known else Spec()

        walk = jax.tree_util.tree_map_with_path
        stacks = jax.tree.map(lambda norm: len(norm.shape), state.L)
        both = {field: walk(of_factor, getattr(state, field), stacks) for field in ("Q", "L")}
        rest = {
            field: walk(of_leaf, getattr(state, field)) for field in ("count", "momentum_buffer", "refresh", "skipped")
        }
        return KronState(**both, **rest)

    def of_part(path: Sequence[Any], part: Any) -> Any:
        if isinstance(part, KronState):
            return of_factors(part)
        return jax.tree_util.tree_map_with_path(lambda inner, leaf: of_leaf((*path, *inner), leaf), part)

    kinds = tuple(STATES.values())
    return jax.tree_util.tree_map_with_path(of_part, state, is_leaf=lambda part: isinstance(part, kinds))


def padded(spec: Spec, ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


def followed(shape: tuple[int, ...], p_shape: tuple[int, ...], spec: tuple[Any, ...]) -> Spec:
    """The spec of something that has its parameter's axes, some of them reduced to size 1."""
    if len(shape) != len(p_shape) or any(n not in (1, m) for n, m in zip(shape, p_shape, strict=True)):
        return Spec()
    return Spec(*(own if n == m else None for n, m, own in zip(shape, p_shape, spec, strict=True)))
