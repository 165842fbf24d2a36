"""Shards of parameters inside ``jax.shard_map``: norms and averages of the whole, computed from parts.

Under ``jax.jit`` nothing of this is needed: there the compiler sees whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from thalweg.arrays import Axes, Scalar, Shape, Term, reduced_shape
from thalweg.errors import OptionError, ParameterError
from thalweg.optax.trees import Named, Tree, by_spec
from thalweg.spaces import jax as whole

Arr: TypeAlias = jax.Array
#: For each axis of a parameter the mesh axes over which it is sharded.
MeshAxes: TypeAlias = tuple[tuple[str, ...], ...]


def mesh_axes_of(spec: Any, ndim: int, name: str) -> MeshAxes:
    """A PartitionSpec, axis by axis."""
    if not isinstance(spec, PartitionSpec) or len(spec) > ndim:
        raise OptionError(
            f"the entry of specs for parameter {name!r} must be a PartitionSpec for {ndim} axes, got {spec!r}"
        )
    parts = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    return tuple(parts) + ((),) * (ndim - len(parts))


def divisions_of(specs: Any, params: Tree, flat: Named) -> list[MeshAxes]:
    """How each parameter is sharded; without specs none is."""
    if specs is None:
        return [((),) * p.ndim for p in flat.leaves]
    triples = zip(by_spec(specs, params), flat.leaves, flat.names, strict=True)
    return [mesh_axes_of(spec, p.ndim, name) for spec, p, name in triples]


def space_of(mesh_axes: MeshAxes) -> Any:
    """The space that sums over all shards of a parameter."""
    return Shards(mesh_axes) if any(mesh_axes) else whole


def check_whole(name: str, p: Arr) -> None:
    """Without specs a parameter must be whole: norms of its shards would be taken for its own."""
    varying = varying_of(p)
    if varying:
        raise ParameterError(
            f"parameter {name!r} differs between devices along {sorted(varying)} of shard_map: pass specs=... to say "
            "how it is sharded, as in shard_map's in_specs (PartitionSpec() if each device has a parameter of its own)"
        )


def typed_layout(x: Arr) -> NamedSharding | None:
    """How x is laid over devices, where jax keeps that in types (explicit sharding)."""
    sharding = jax.typeof(x).sharding
    return sharding if any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types) else None


def varying_of(x: Arr) -> frozenset[str]:
    """The mesh axes along which x differs, as far as shard_map keeps account of it."""
    kind: Any = jax.typeof(x)
    newer = getattr(getattr(kind, "manual_axis_type", None), "varying", None)
    return frozenset(newer or getattr(kind, "vma", None) or ())


def own_names(x: Arr, names: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the mesh axes along which x differs; all of them where jax keeps no account of that."""
    varying = varying_of(x)
    return tuple(name for name in names if name in varying) if varying else names


def count_of(axes: Sequence[str]) -> int:
    """Over how many devices these mesh axes divide."""
    return int(jax.lax.psum(1, tuple(axes))) if axes else 1


class Shards:
    """The jax space, seen from one device of several that hold a parameter together."""

    def __init__(self, mesh_axes: MeshAxes) -> None:
        self.mesh_axes = mesh_axes

    def __getattr__(self, name: str) -> Any:
        return getattr(whole, name)  # elementwise work needs no other device

    def in_precision(self, precision: str) -> Shards:
        return self

    def shape(self, x: Arr) -> Shape:
        return tuple(n * count_of(axes) for n, axes in zip(x.shape, self.mesh_axes, strict=True))

    def across(self, axes: Axes) -> tuple[str, ...]:
        """The mesh axes over which these axes of a parameter are sharded."""
        chosen = self.mesh_axes if axes is None else [self.mesh_axes[axis] for axis in axes]
        return tuple(name for names in chosen for name in names)

    def zeros_reduced(self, x: Arr, axes: tuple[int, ...]) -> Arr:
        return jnp.zeros(reduced_shape(x.shape, axes), x.dtype)

    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        """One message for each set of mesh axes."""
        totals = list(whole.sums(*terms))
        across = [own_names(total, self.across(axes)) for total, (_, axes) in zip(totals, terms, strict=True)]
        for names in dict.fromkeys(filter(None, across)):  # in an order that every process has
            members = [i for i, other in enumerate(across) if other == names]
            message = jax.lax.psum(jnp.concatenate([jnp.ravel(totals[i]) for i in members]), names)
            for i, total in zip(members, split_like(message, [totals[i] for i in members]), strict=True):
                totals[i] = total
        return tuple(totals)

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        sizes = [
            math.prod(x.shape if axes is None else [x.shape[axis] for axis in axes]) * count_of(self.across(axes))
            for x, axes in terms
        ]
        return tuple(total / max(1, size) for total, size in zip(self.sums(*terms), sizes, strict=True))

    def amax(self, x: Arr, axes: Axes) -> Scalar:
        local = whole.amax(x, axes)
        names = own_names(local, self.across(axes))
        return jax.lax.pmax(local, names) if names else local

    def positions(self, like: Arr) -> tuple[Arr, int]:
        """Positions in the whole parameter, so that random numbers do not depend on its sharding."""
        place, stride = jnp.zeros(like.shape, jnp.uint32), 1
        for axis in reversed(range(like.ndim)):
            first = own_place(self.mesh_axes[axis]) * like.shape[axis]
            index = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis) + jnp.uint32(first)
            place = place + index * jnp.uint32(stride & 0xFFFFFFFF)
            stride *= self.shape(like)[axis]
        return place, 0


def split_like(flat: Arr, parts: Sequence[Arr]) -> list[Arr]:
    """A flat array cut into arrays with the shapes of these parts."""
    result, start = [], 0
    for part in parts:
        result.append(jnp.reshape(flat[start : start + part.size], part.shape))
        start += part.size
    return result


def own_place(axes: Sequence[str]) -> Any:
    """Which of the parts along an axis this device holds."""
    return jax.lax.axis_index(tuple(axes)) if axes else jnp.int32(0)


def gather_whole(x: Arr, mesh_axes: MeshAxes) -> Arr:
    """The whole of which every device holds a part, for rules that need it.

    By a sum of parts amid zeros: so shard_map can tell that the result is the same on every device.
    """
    names = tuple(name for axes in mesh_axes for name in axes)
    if not names:
        return x
    shape = tuple(n * count_of(axes) for n, axes in zip(x.shape, mesh_axes, strict=True))
    starts = [own_place(axes) * n for n, axes in zip(x.shape, mesh_axes, strict=True)]
    total: Arr = jax.lax.psum(jax.lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, starts), names)
    return total


def own_part(x: Arr, mesh_axes: MeshAxes) -> Arr:
    """The part of a whole that this device holds."""
    if not any(mesh_axes):
        return x
    shape = tuple(n // count_of(axes) for n, axes in zip(x.shape, mesh_axes, strict=True))
    starts = [own_place(axes) * n for n, axes in zip(shape, mesh_axes, strict=True)]
    return jax.lax.dynamic_slice(x, starts, shape)
