"""The jax space: the rules as plain ``jax.numpy``, traceable by ``jit``, ``vmap`` and ``scan``."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    derived,
    elementwise,
    in_precisions,
    reduced_shape,
    shape_along,
)

Arr: TypeAlias = jax.Array
R = TypeVar("R")


def shape(x: Arr) -> Shape:
    return x.shape


def dtype(x: Arr) -> str:
    return x.dtype.name


def astype(x: Arr, dtype: str) -> Arr:
    return x.astype(dtype)


def full(shape: Shape, value: float, like: Arr) -> Arr:
    return jnp.full(shape, value, like.dtype, device=replicated_with(like))


def zeros_like(x: Arr) -> Arr:
    return shard_like(jnp.zeros_like(x, dtype=x.dtype), x)


def zeros_reduced(x: Arr, axes: tuple[int, ...]) -> Arr:
    if not over_devices(x):
        return jnp.zeros(reduced_shape(x.shape, axes), x.dtype, device=replicated_with(x))
    return zeros_like(jnp.sum(x, axis=axes, keepdims=True))


def over_devices(x: Arr) -> bool:
    """Whether x is spread over devices by the compiler or by jax itself."""
    mesh = jax.typeof(x).sharding.mesh
    return not mesh.empty and any(kind != AxisType.Manual for kind in mesh.axis_types)


def shard_like(x: Arr, y: Arr) -> Arr:
    """x, laid over devices as y is.

    The choice between x and x is gone when the compiler has done its work, but it has seen them side by side by then.
    """
    return jnp.where(y == y, x, x) if over_devices(y) else x


def replicate(x: Arr, stacked: int) -> Arr:
    """x on every device as a whole, but for the first ``stacked`` axes, which may be divided."""
    if not over_devices(x):
        return x
    if isinstance(x, jax.core.Tracer):
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * stacked)
        pinned: Arr = jax.lax.with_sharding_constraint(x, NamedSharding(jax.typeof(x).sharding.mesh, spec))
        return pinned
    return x if stacked else jax.device_put(x, replicated_with(x))


def replicated_with(x: Arr) -> jax.sharding.Sharding | None:
    """The sharding that repeats an array on every device that has a part of x; None: the compiler chooses."""
    if isinstance(x, jax.core.Tracer) or not getattr(x, "committed", False):
        return None
    return NamedSharding(x.sharding.mesh, PartitionSpec()) if isinstance(x.sharding, NamedSharding) else x.sharding


def identity(size: int, like: Arr) -> Arr:
    return jnp.eye(size, dtype=like.dtype)


def positions(like: Arr) -> tuple[Arr, int]:
    """Positions past 2**32 repeat: without x64 mode there is no wider integer."""
    return jax.lax.iota(jnp.uint32, like.size).reshape(like.shape), 0


def word(n: int) -> Any:
    return jnp.dtype("uint32").type(n)  # without x64 mode, plain numbers above 2**31 do not go with uint32


@jax.custom_jvp
def _sqrt(x: Arr) -> Arr:
    return jnp.sqrt(x)


@_sqrt.defjvp
def _sqrt_jvp(primals: tuple[Arr], tangents: tuple[Arr]) -> tuple[Arr, Arr]:
    """At 0 the slope is taken as 0: the norm of a parameter that is zero says nothing, and infinity would spoil all."""
    root = jnp.sqrt(primals[0])
    return root, jnp.where(root == 0, 0, tangents[0] / jnp.where(root == 0, 1, 2 * root))


abs, sqrt, exp, log, expm1, cos, floor, isfinite, maximum, minimum = elementwise(
    lambda name: _sqrt if name == "sqrt" else getattr(jnp, name)
)

_always, _unless_better = derived(sys.modules[__name__], jnp.where)
where, reshape, folded, reshape_like, matmul_rounded, divided, mean_power = _always
_, _, matrix_norm, add_identity, means, largest_magnitude, combined = _unless_better


def spacing(x: Arr, digits: int, lowest: int) -> Arr:
    return jnp.ldexp(jnp.ones((), x.dtype), jnp.maximum(jnp.frexp(x)[1], lowest) - digits)


def bits(x: Arr) -> Arr:
    words: Arr = jax.lax.bitcast_convert_type(x, jnp.int32)
    return words


def from_bits(x: Arr) -> Arr:
    numbers: Arr = jax.lax.bitcast_convert_type(x, jnp.float32)
    return numbers


def sums(*terms: Term) -> tuple[Scalar, ...]:
    """A sum over several axes goes on from one over fewer of them, if there is one: x is read once less."""
    totals: list[Scalar] = []
    for index, term in enumerate(terms):
        x, axes = term
        partial = x * x if isinstance(term, Squares) else x
        for total, earlier in zip(totals, terms[:index], strict=True):
            if type(earlier) is type(term) and earlier[0] is x and axes and set(earlier[1] or axes) < set(axes):
                partial = total
        totals.append(jnp.sum(partial, axis=axes, keepdims=axes is not None))
    return tuple(totals)


def amax(x: Arr, axes: Axes) -> Scalar:
    return jnp.max(x, axis=axes, keepdims=axes is not None, initial=-jnp.inf)


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    if not isinstance(condition, jax.core.Tracer):
        return yes() if condition else no()
    chosen: R = jax.lax.cond(condition, yes, no)
    return chosen


def peaks(x: Arr, axis: int, size: int) -> Arr:
    groups = jnp.abs(folded(x, axis, size))
    numbers = jnp.all(groups == groups, axis=-1)  # of NaN, XLA for CPUs may take any other number for the largest
    return jnp.where(numbers, jnp.max(groups, axis=-1), math.nan)


swapaxes: Callable[..., Arr] = jnp.swapaxes
upper: Callable[..., Arr] = jnp.triu
join: Callable[..., Arr] = jnp.concatenate


def cut(x: Arr, axis: int, sizes: Shape) -> list[Arr]:
    return jnp.split(x, list(itertools.accumulate(sizes[:-1])), axis)


def stack_all(lists: Sequence[Sequence[Arr]]) -> list[Arr]:
    """The arrays of each list as one, with a leading axis more."""
    return list(map(jnp.stack, lists))


def take_apart(stacks: Sequence[Arr]) -> list[Sequence[Arr]]:
    """The members of each stack."""
    return list(map(jnp.unstack, stacks))


def matmul(x: Arr, y: Arr, precision: str | None = None) -> Arr:
    """In full precision, unless a rule or ``jax.default_matmul_precision`` asks for another."""
    return wide_product(x, y, precision).astype(x.dtype)


def wide_product(x: Arr, y: Arr, asked: str | None) -> Arr:
    """In float32 at least: sums of products of 16 bits keep their digits."""
    precision: jax.lax.Precision | None = jax.lax.Precision.HIGH if asked == "tf32" else jax.lax.Precision.HIGHEST
    if asked is None and jax.config.jax_default_matmul_precision is not None:  # type: ignore[attr-defined]
        precision = None
    return jnp.matmul(x, y, precision=precision, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def matmul_add(x: Arr, y: Arr, z: Arr, product: float, plus: float, precision: str | None = None) -> Arr:
    xy = wide_product(x, y, precision)
    return (product * xy + plus * z.astype(xy.dtype)).astype(x.dtype)


matmul_symmetric, matmul_add_symmetric = matmul, matmul_add


def in_precision(precision: str) -> Any:
    return IN_PRECISION[precision]


def rounded(x: Arr, dtype: str) -> Arr:
    return x.astype(dtype)


def solve(matrix: Arr, right: Arr) -> Arr:
    return jax.scipy.linalg.solve_triangular(matrix, right, lower=True)


def eigenvectors(x: Arr) -> Arr:
    columns: Arr = jnp.linalg.eigh(x)[1]
    return columns[..., ::-1]


def orthonormal(x: Arr) -> Arr:
    columns: Arr = jnp.linalg.qr(x)[0]
    return columns


def arrange(x: Arr, by: Arr, axis: int) -> Arr:
    order = jnp.argsort(by, axis=-1, descending=True)
    return jnp.take_along_axis(x, order.reshape(shape_along(x.shape, axis)), axis)


def largest_column(x: Arr) -> Arr:
    scaled = x / jnp.maximum(largest_magnitude(x, (-2, -1)), float(jnp.finfo(x.dtype).tiny))  # type: ignore[no-untyped-call]
    index = jnp.argmax(jnp.sum(scaled * scaled, axis=-2, keepdims=True), axis=-1, keepdims=True)
    return jnp.take_along_axis(x, index, axis=-1)


IN_PRECISION = in_precisions(globals(), globals())
