"""How state is sharded when its parameters are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from thalweg.optax.states import SEVERAL, STATE_CLASSES
from thalweg.optax.trees import Tree, by_spec, named

Spec = jax.sharding.PartitionSpec


def state_specs(state: Tree, params: Tree, specs: Tree) -> Tree:
    """The PartitionSpecs of an optimizer's state, from those of the parameters.

    state: the state, real or from ``jax.eval_shape(solver.init, params)``; wrappers of optax may be around it.
    specs: a tree of PartitionSpec with the structure of params, or a prefix of it.

    State of the parameter's shape is sharded like it, and so are scales of groups. Row and column averages follow the
    axis that is left, Kron's factors the stack they are in, and single numbers are everywhere.
    """
    flat = named(params)
    by_path = {
        tuple(path): (tuple(p.shape), pad(spec, len(p.shape)))
        for path, p, spec in zip(flat.paths, flat.leaves, by_spec(specs, params), strict=True)
    }

    def of_leaf(path: Sequence[Any], leaf: Any) -> Spec:
        """By the parameter whose path is the end of the leaf's."""
        for start in range(len(path) + 1):
            if tuple(path[start:]) in by_path:
                return follow(tuple(leaf.shape), *by_path[tuple(path[start:])])
        return Spec()

    def of_factors(part: Any, several: Sequence[str]) -> Any:
        """Factors follow the axes of a stack, whose shape is that of their norms; of blocks these are a column."""

        def of_factor(path: Sequence[Any], leaf: Any, *beside: Any) -> Spec:
            known = by_path.get(tuple(path[:-1]))
            factor, norm = (len(other.shape) for other in beside)
            stacked = norm if norm < factor else norm - 2
            return Spec(*known[1][:stacked]) if known else Spec()

        trees = [getattr(part, field) for field in several]
        both = {field: walk(of_factor, getattr(part, field), *trees) for field in several}
        rest = {field: walk(of_leaf, getattr(part, field)) for field in part._fields if field not in several}
        return type(part)(**both, **rest)

    def of_part(path: Sequence[Any], part: Any) -> Any:
        several = [field for field in SEVERAL if hasattr(part, field)] if isinstance(part, classes) else []
        if several:
            return of_factors(part, several)
        return walk(lambda inner, leaf: of_leaf((*path, *inner), leaf), part)

    classes, walk = tuple(STATE_CLASSES), jax.tree_util.tree_map_with_path
    return walk(of_part, state, is_leaf=lambda part: isinstance(part, classes))


def pad(spec: Spec, ndim: int) -> tuple[Any, ...]:
    return (*spec, *[None] * (ndim - len(spec)))


def follow(shape: tuple[int, ...], p_shape: tuple[int, ...], spec: tuple[Any, ...]) -> Spec:
    """The spec of something that has its parameter's axes, some reduced to size 1, or the last ones to groups."""
    lead = len(shape) - 1
    grouped = 0 < lead < len(p_shape) and (lead < len(p_shape) - 1 or shape[lead] not in (1, p_shape[lead]))
    if grouped and shape[:lead] == p_shape[:lead]:
        return Spec(*spec[: lead + (shape[lead] > 1)])
    if len(shape) != len(p_shape) or any(n not in (1, m) for n, m in zip(shape, p_shape, strict=True)):
        return Spec()
    return Spec(*(axis if n == m else None for n, m, axis in zip(shape, p_shape, spec, strict=True)))
