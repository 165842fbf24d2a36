"""Trees of parameters: the names of their leaves, and values chosen leaf by leaf."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.dtypes import DTYPES
from thalweg.errors import OptionError, ParameterError

Tree: TypeAlias = Any
TreeDef: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]


class Named(NamedTuple):
    """The leaves of a tree, with their paths as names."""

    paths: list[Path]
    names: list[str]
    leaves: list[Any]
    treedef: TreeDef


def named(tree: Tree) -> Named:
    """The leaves with their names. Boxes around single arrays, as flax has them, are looked through."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(tree)
    paths = [path for path, _ in pairs]
    children = Counter(path[:-1] for path in paths)

    def unboxed(path: Path) -> Path:
        last = path[-1] if len(path) > 1 and children[path[:-1]] == 1 else None
        return path[:-1] if isinstance(last, jax.tree_util.GetAttrKey) and last.name == "value" else path

    return Named(paths, [dotted(unboxed(path)) for path in paths], [leaf for _, leaf in pairs], treedef)


def dotted(path: Path) -> str:
    """A path as a name: ``{"layers": [{"w": x}]}`` has the leaf ``layers.0.w``; a single array is ``params``."""
    return jax.tree_util.keystr(path, simple=True, separator=".") if path else "params"


def parameters(tree: Tree) -> Named:
    """The parameters of a tree as arrays, checked."""
    flat = named(tree)
    leaves = [as_array(leaf, f"parameter {name!r}") for name, leaf in zip(flat.names, flat.leaves, strict=True)]
    for name, leaf in zip(flat.names, leaves, strict=True):
        if leaf.dtype.name not in DTYPES:
            raise ParameterError(
                f"parameter {name!r} has dtype {leaf.dtype}: it must be one of {', '.join(DTYPES)}; "
                "leave it out of the parameters, or wrap the optimizer in optax.masked"
            )
    return flat._replace(leaves=leaves)


def check_gradients(tree: Tree, params: Named) -> list[Any]:
    """The gradients, in the order of their parameters, checked."""
    try:
        leaves = params.treedef.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError) as error:
        raise ParameterError(f"gradients and parameters must be trees of the same structure: {error}") from None
    result = []
    for name, leaf, p in zip(params.names, leaves, params.leaves, strict=True):
        if leaf is None:
            raise ParameterError(
                f"parameter {name!r} has no gradient: pass zeros, or wrap the optimizer in optax.masked"
            )
        g = as_array(leaf, f"the gradient of parameter {name!r}")
        if g.shape != p.shape:
            raise ParameterError(
                f"parameter {name!r} has shape {p.shape}, and its gradient {g.shape}: they must be equal"
            )
        if g.dtype.name not in DTYPES:
            raise ParameterError(
                f"the gradient of parameter {name!r} has dtype {g.dtype}: it must be one of {', '.join(DTYPES)}"
            )
        result.append(g)
    return result


def as_array(leaf: Any, what: str) -> Any:
    """The leaf as an array of jax: Python's numbers, numpy's arrays, and shapes without contents."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jnp.zeros(leaf.shape, leaf.dtype)
    try:
        return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    except (TypeError, ValueError):
        raise ParameterError(f"{what} must be an array, got {type(leaf).__name__}") from None


def by_leaf(chosen: Any, params: Tree, option: str, is_leaf: Callable[[Any], bool] | None = None) -> list[Any]:
    """One value for each leaf of params, from a value, a tree that is a prefix of params, or a function of params."""
    if callable(chosen):
        chosen = chosen(params)
    try:
        full = jax.tree.map(lambda value, part: jax.tree.map(lambda _: value, part), chosen, params, is_leaf=is_leaf)
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(
            f"{option} must be a tree with the structure of the parameters, or a prefix of it: {error}"
        ) from None
    return jax.tree.leaves(full, is_leaf=is_leaf)


def by_spec(specs: Any, params: Tree) -> list[Any]:
    """The PartitionSpec of each leaf of params, from a tree of them that is a prefix of params."""
    return by_leaf(specs, params, "specs", lambda x: isinstance(x, jax.sharding.PartitionSpec))
