"""Shards of parameters inside ``jax.shard_map``: norms and averages of the whole, computed from parts.

Under ``jax.jit`` nothing of this is needed: there the compiler sees whole arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from thalweg.arrays import Axes, Scalar, Shape, Term
from thalweg.errors import OptionError, ParameterError
from thalweg.spaces import jax as whole

Arr: TypeAlias = jax.Array
#: For each axis of a parameter the mesh axes it is divided over.
Layout: TypeAlias = tuple[tuple[str, ...], ...]


def layout_of(spec: Any, ndim: int, name: str) -> Layout:
    """A PartitionSpec, axis by axis."""
    if not isinstance(spec, jax.sharding.PartitionSpec) or len(spec) > ndim:
        raise OptionError(
            f"the entry of specs for parameter {name!r} must be a PartitionSpec for {ndim} axes, got {spec!r}"
        )
    parts = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    return tuple(parts) + ((),) * (ndim - len(parts))


def check_whole(name: str, p: Arr) -> None:
    """Without specs a parameter must be whole: norms of its shards would be taken for its own."""
    varying = getattr(jax.typeof(p), "vma", None) if hasattr(jax, "typeof") else None
    if varying:
        raise ParameterError(
            f"parameter {name!r} differs between devices along {sorted(varying)} of shard_map: say with specs=... how "
            "it is divided, as shard_map's own in_specs do (PartitionSpec() for parameters that are each on their own)"
        )


def count_of(axes: Sequence[str]) -> int:
    """Over how many devices these mesh axes divide."""
    return int(jax.lax.psum(1, tuple(axes))) if axes else 1


class Shards:
    """The jax space, seen from one device of several that hold a parameter together."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def __getattr__(self, name: str) -> Any:
        return getattr(whole, name)  # elementwise work needs no other device

    def shape(self, x: Arr) -> Shape:
        return tuple(n * count_of(axes) for n, axes in zip(x.shape, self.layout, strict=True))

    def across(self, axes: Axes) -> tuple[str, ...]:
        """The mesh axes over which these axes of a parameter are divided."""
        chosen = self.layout if axes is None else [self.layout[axis] for axis in axes]
        return tuple(name for names in chosen for name in names)

    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        """One message for each set of mesh axes."""
        totals = list(whole.sums(*terms))
        across = [self.across(axes) for _, axes in terms]
        for names in set(across) - {()}:
            members = [i for i, own in enumerate(across) if own == names]
            for i, total in zip(members, jax.lax.psum([totals[i] for i in members], names), strict=True):
                totals[i] = total
        return tuple(totals)

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        sizes = [
            math.prod(x.shape if axes is None else [x.shape[axis] for axis in axes]) * count_of(self.across(axes))
            for x, axes in terms
        ]
        return tuple(total / max(1, size) for total, size in zip(self.sums(*terms), sizes, strict=True))

    def amax(self, x: Arr, axes: Axes) -> Scalar:
        names, local = self.across(axes), whole.amax(x, axes)
        return jax.lax.pmax(local, names) if names else local

    def positions(self, like: Arr) -> tuple[Arr, int]:
        """Positions in the whole parameter, so that random numbers do not depend on how it is divided."""
        place, stride = jnp.zeros(like.shape, jnp.uint32), 1
        for axis in reversed(range(like.ndim)):
            first = own_place(self.layout[axis]) * like.shape[axis]
            index = jax.lax.broadcasted_iota(jnp.uint32, like.shape, axis) + jnp.uint32(first)
            place = place + index * jnp.uint32(stride & 0xFFFFFFFF)
            stride *= self.shape(like)[axis]
        return place, 0


def own_place(axes: Sequence[str]) -> Any:
    """Which of the parts along an axis this device holds."""
    return jax.lax.axis_index(tuple(axes)) if axes else 0


def gathered(x: Arr, layout: Layout) -> Arr:
    """The whole of which every device holds a part, for rules that need it.

    By a sum of parts amid zeros: so shard_map can tell that the result is the same on every device.
    """
    names = tuple(name for axes in layout for name in axes)
    if not names:
        return x
    shape = tuple(n * count_of(axes) for n, axes in zip(x.shape, layout, strict=True))
    starts = [own_place(axes) * n for n, axes in zip(x.shape, layout, strict=True)]
    total: Arr = jax.lax.psum(jax.lax.dynamic_update_slice(jnp.zeros(shape, x.dtype), x, starts), names)
    return total


def own_part(x: Arr, layout: Layout) -> Arr:
    """The part of a whole that this device holds."""
    if not any(layout):
        return x
    shape = tuple(n // count_of(axes) for n, axes in zip(x.shape, layout, strict=True))
    starts = [own_place(axes) * n for n, axes in zip(shape, layout, strict=True)]
    return jax.lax.dynamic_slice(x, starts, shape)
