"""The jax space: the rules as plain ``jax.numpy``, traceable by ``jit``, ``vmap`` and ``scan``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    count,
    number_function,
    number_log,
    number_maximum,
    number_minimum,
    reduced_shape,
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
    return jnp.full(shape, value, like.dtype)


def zeros_like(x: Arr) -> Arr:
    return jnp.zeros_like(x)


def zeros_reduced(x: Arr, axes: tuple[int, ...]) -> Arr:
    return jnp.zeros(reduced_shape(x.shape, axes), x.dtype)


def identity(size: int, like: Arr) -> Arr:
    return jnp.eye(size, dtype=like.dtype)


def positions(like: Arr) -> tuple[Arr, int]:
    """Positions past 2**32 repeat: without x64 mode there is no wider integer."""
    return jax.lax.iota(jnp.uint32, like.size).reshape(like.shape), 0


def word(n: int) -> Arr:
    number: Arr = jnp.uint32(n)  # without x64 mode, plain numbers above 2**31 do not go with uint32
    return number


sqrt = number_function(math.sqrt, jnp.sqrt)
exp = number_function(math.exp, jnp.exp)
log = number_function(number_log, jnp.log)
expm1 = number_function(math.expm1, jnp.expm1)
cos = number_function(math.cos, jnp.cos)
abs = number_function(abs, jnp.abs)
floor = number_function(math.floor, jnp.floor)
isfinite = number_function(math.isfinite, jnp.isfinite)
maximum = number_function(number_maximum, jnp.maximum)
minimum = number_function(number_minimum, jnp.minimum)


def spacing(x: Arr, digits: int, lowest: int) -> Arr:
    return jnp.ldexp(jnp.ones((), x.dtype), jnp.maximum(jnp.frexp(x)[1], lowest) - digits)


def where(condition: Truth, x: Scalar, y: Scalar) -> Scalar:
    if isinstance(condition, bool):
        return x if condition else y
    return jnp.where(condition, x, y)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    def total(term: Term) -> Scalar:
        x, axes = term
        return jnp.sum(x * x if isinstance(term, Squares) else x, axis=axes, keepdims=axes is not None)

    return tuple(map(total, terms))


def means(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(total / count(x.shape, axes) for total, (x, axes) in zip(sums(*terms), terms, strict=True))


def amax(x: Arr, axes: Axes) -> Scalar:
    return jnp.max(x, axis=axes, keepdims=axes is not None, initial=-jnp.inf)


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    if isinstance(condition, bool):
        return yes() if condition else no()
    chosen: R = jax.lax.cond(condition, yes, no)
    return chosen


def reshape(x: Arr, shape: Shape) -> Arr:
    return jnp.reshape(x, shape)


def swapaxes(x: Arr, first: int, second: int) -> Arr:
    return jnp.swapaxes(x, first, second)


def matmul(x: Arr, y: Arr) -> Arr:
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def upper(x: Arr) -> Arr:
    return jnp.triu(x)


def solve(matrix: Arr, right: Arr) -> Arr:
    return jax.scipy.linalg.solve_triangular(matrix, right, lower=True)


def largest_column(x: Arr) -> Arr:
    index = jnp.argmax(jnp.sum(x * x, axis=-2, keepdims=True), axis=-1, keepdims=True)
    return jnp.take_along_axis(x, index, axis=-1)
