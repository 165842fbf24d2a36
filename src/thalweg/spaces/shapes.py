"""The space of shapes: arrays without numbers, to learn what a rule would do and keep, without doing it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Term,
    Truth,
    Value,
    count,
    elementwise,
    folded_shape,
    reduced_shape,
)
from thalweg.dtypes import NARROW

R = TypeVar("R")

#: Of two dtypes in one operation, the later one is the result's.
ORDER = ("bool", "uint8", "int8", "int32", "int64", "bfloat16", "float16", "float32", "float64")


class Meter:
    """Where arrays without numbers are made."""

    def array(self, shape: Shape, dtype: str) -> ShapeOnly:
        return ShapeOnly(shape, dtype, Memory(self, 0))


class Memory:
    """What an array and the views of it share."""

    __slots__ = ("meter",)

    def __init__(self, meter: Meter, size: int) -> None:
        self.meter = meter


def _operator(dtype: str | None = None) -> Callable[..., Any]:
    def method(x: ShapeOnly, *other: Any) -> Any:
        (y,) = other or (x,)
        return apply(x, y, dtype=dtype) if isinstance(y, (ShapeOnly, int, float)) else NotImplemented

    return method


class ShapeOnly:
    """An array without numbers."""

    __slots__ = ("dtype", "memory", "shape")

    def __init__(self, shape: Shape, dtype: str, memory: Memory) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory

    @property
    def meter(self) -> Meter:
        return self.memory.meter

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def new(self, shape: Shape | None = None, dtype: str | None = None) -> ShapeOnly:
        return self.meter.array(self.shape if shape is None else shape, dtype or self.dtype)

    def view(self, shape: Shape, *, dtype: str | None = None) -> ShapeOnly:
        return ShapeOnly(shape, dtype or self.dtype, self.memory)

    def __getitem__(self, index: int) -> ShapeOnly:
        return self.view(self.shape[1:])

    def __bool__(self) -> bool:
        raise TypeError("an array without numbers has no truth value")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _operator()
    __pow__ = __rpow__ = __and__ = __rand__ = __xor__ = __rxor__ = __rshift__ = __neg__ = __abs__ = _operator()
    __gt__ = __ge__ = __lt__ = __le__ = _operator(dtype="bool")
    __eq__ = __ne__ = _operator(dtype="bool")
    __hash__ = None  # type: ignore[assignment]


def apply(*operands: Any, dtype: str | None = None) -> ShapeOnly:
    """A new array, the result of an elementwise operation; numbers among the operands widen nothing."""
    arrays = [x for x in operands if isinstance(x, ShapeOnly)]
    widest = dtype or max((x.dtype for x in arrays), key=ORDER.index)
    return arrays[0].new(broadcast([x.shape for x in arrays]), widest)


def broadcast(shapes: list[Shape]) -> Shape:
    if len(set(shapes)) == 1:
        return shapes[0]
    ndim = max(map(len, shapes))
    padded = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    found = []
    for sizes in zip(*padded, strict=True):
        size = next((n for n in sizes if n != 1), 1)
        if any(n not in (1, size) for n in sizes):
            raise ValueError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
        found.append(size)
    return tuple(found)


# ---- the functions of the space


def shape(x: ShapeOnly) -> Shape:
    return x.shape


def dtype(x: ShapeOnly) -> str:
    return x.dtype


def astype(x: ShapeOnly, dtype: str) -> ShapeOnly:
    return x if x.dtype == dtype else x.new(dtype=dtype)


def full(shape: Shape, value: float, like: ShapeOnly) -> ShapeOnly:
    return like.new(shape)


def zeros_like(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def zeros_reduced(x: ShapeOnly, axes: tuple[int, ...]) -> ShapeOnly:
    return x.new(reduced_shape(x.shape, axes))


def identity(size: int, like: ShapeOnly) -> ShapeOnly:
    return like.new((size, size))


def positions(like: ShapeOnly) -> tuple[ShapeOnly, ShapeOnly]:
    index = like.new(dtype="int64")
    return apply(index), apply(index)


def word(n: int) -> int:
    return n


abs, sqrt, exp, log, expm1, cos, floor, isfinite, maximum, minimum = elementwise(
    lambda name: functools.partial(apply, dtype="bool" if name == "isfinite" else None)
)


def spacing(x: ShapeOnly, digits: int, lowest: int) -> ShapeOnly:
    exponent = x.new(dtype="int32")
    return apply(exponent, x)


def bits(x: ShapeOnly) -> ShapeOnly:
    return x.view(x.shape, dtype="int32")


def from_bits(x: ShapeOnly) -> ShapeOnly:
    return x.view(x.shape, dtype="float32")


def where(condition: Truth, x: Value, y: Value) -> Value:
    if isinstance(condition, bool):
        return x if condition else y
    kinds = [value.dtype for value in (x, y) if isinstance(value, ShapeOnly)]
    return apply(condition, x, y, dtype=kinds[0] if kinds else "float32")


def sums(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(total(term) for term in terms)


def means(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(total(term) / count(term[0].shape, term[1]) for term in terms)


def total(term: Term) -> Any:
    x, axes = term
    return x.new(() if axes is None else reduced_shape(x.shape, axes))


def amax(x: ShapeOnly, axes: Axes) -> Scalar:
    return x.new(() if axes is None else reduced_shape(x.shape, axes))


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    """One side: both give the same shapes."""
    return no() if condition is False else yes()


def folded(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return reshape(x, folded_shape(x.shape, axis, size))


def peaks(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return apply(folded(x, axis, size)).new(folded_shape(x.shape, axis, size)[:-1])


def reshape_like(x: ShapeOnly, like: ShapeOnly) -> ShapeOnly:
    return reshape(x, like.shape)


def reshape(x: ShapeOnly, shape: Shape) -> ShapeOnly:
    return x.view(shape)


def swapaxes(x: ShapeOnly, first: int, second: int) -> ShapeOnly:
    sizes = list(x.shape)
    sizes[first], sizes[second] = sizes[second], sizes[first]
    return x.view(tuple(sizes))


def cut(x: ShapeOnly, axis: int, sizes: Shape) -> list[ShapeOnly]:
    return [x.view((*x.shape[:axis], size, *x.shape[axis + 1 :])) for size in sizes]


def join(parts: Sequence[ShapeOnly], axis: int) -> ShapeOnly:
    shape = parts[0].shape
    return parts[0].new((*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :]))


def matmul(x: ShapeOnly, y: ShapeOnly) -> ShapeOnly:
    batch = max(x.shape[:-2], y.shape[:-2], key=math.prod)
    return x.new((*batch, x.shape[-2], y.shape[-1]))


def matmul_add(x: ShapeOnly, y: ShapeOnly, z: ShapeOnly, product: float, plus: float) -> ShapeOnly:
    return apply(product * matmul(x, y), plus * z)


matmul_symmetric, matmul_add_symmetric = matmul, matmul_add


def matmul_rounded(x: ShapeOnly, y: ShapeOnly, dtype: str) -> ShapeOnly:
    return rounded(matmul(x, y), dtype)


def add_identity(x: ShapeOnly, a: float) -> ShapeOnly:
    return x.new()


def rounded(x: ShapeOnly, dtype: str) -> ShapeOnly:
    return x.new()


def matrix_norm(x: ShapeOnly) -> ShapeOnly:
    squares = x.new((*x.shape[:-2], 1, 1))
    return astype(squares, "float32") if x.dtype in NARROW else squares


def divided(x: ShapeOnly, by: ShapeOnly, dtype: str | None) -> ShapeOnly:
    quotient: ShapeOnly = x / by
    return quotient if dtype is None else rounded(quotient, dtype)


def upper(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def solve(matrix: ShapeOnly, right: ShapeOnly) -> ShapeOnly:
    return right.new()


def eigenvectors(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def orthonormal(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def arrange(x: ShapeOnly, by: ShapeOnly, axis: int) -> ShapeOnly:
    return x.new()


def largest_column(x: ShapeOnly) -> ShapeOnly:
    return x.new((*x.shape[:-1], 1))
