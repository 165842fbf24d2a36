"""The space of shapes: arrays without numbers, to learn what a rule would keep and allocate, without allocating it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    Value,
    count,
    folded_shape,
    number_function,
    number_log,
    number_maximum,
    number_minimum,
    reduced_shape,
)
from thalweg.dtypes import NARROW
from thalweg.spaces.shape_arrays import ShapeOnly, applied

R = TypeVar("R")


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
    return applied(index), applied(index)


def word(n: int) -> int:
    return n


sqrt = number_function(math.sqrt, applied)
exp = number_function(math.exp, applied)
log = number_function(number_log, applied)
expm1 = number_function(math.expm1, applied)
cos = number_function(math.cos, applied)
abs = number_function(abs, applied)
floor = number_function(math.floor, applied)
isfinite = number_function(math.isfinite, lambda x: applied(x, dtype="bool"))
maximum = number_function(number_maximum, applied)
minimum = number_function(number_minimum, applied)


def spacing(x: ShapeOnly, digits: int, lowest: int) -> ShapeOnly:
    exponent = x.new(dtype="int32")
    return applied(exponent, x)


def bits(x: ShapeOnly) -> ShapeOnly:
    return x.view(x.shape, dtype="int32")


def from_bits(x: ShapeOnly) -> ShapeOnly:
    return x.view(x.shape, dtype="float32")


def where(condition: Truth, x: Value, y: Value) -> Value:
    if isinstance(condition, bool):
        return x if condition else y
    kinds = [value.dtype for value in (x, y) if isinstance(value, ShapeOnly)]
    of_numbers = "float64" if condition.ledger.library == "numpy" else "float32"
    return applied(condition, x, y, dtype=kinds[0] if kinds else of_numbers)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(astype(total(term), term[0].dtype) for term in terms)


def means(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(astype(total(term) / count(term[0].shape, term[1]), term[0].dtype) for term in terms)


def total(term: Term) -> Any:
    """numpy stores squares before it sums them, in float64; torch has norms."""
    x, axes = term
    by_numpy = x.ledger.library == "numpy"
    values = x * x if isinstance(term, Squares) and (by_numpy or axes == ()) else x
    shape = () if axes is None else reduced_shape(x.shape, axes)
    return values.new(shape, "float64" if by_numpy and axes else None)


def amax(x: ShapeOnly, axes: Axes) -> Scalar:
    return x.new(() if axes is None else reduced_shape(x.shape, axes))


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    """The side that the ledger says; both, and a choice between them, if it says that the host does not know."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    if condition.ledger.selects:
        chosen: R = select(condition, yes(), no())
        return chosen
    return yes() if condition.ledger.branch else no()


def select(condition: ShapeOnly, yes: Any, no: Any) -> Any:
    if isinstance(yes, (tuple, list)):
        return type(yes)(select(condition, a, b) for a, b in zip(yes, no, strict=True))
    return where(condition, yes, no)


def folded(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return reshape(x, folded_shape(x.shape, axis, size))


def peaks(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return applied(folded(x, axis, size)).new(folded_shape(x.shape, axis, size)[:-1])


def reshape_like(x: ShapeOnly, like: ShapeOnly) -> ShapeOnly:
    return reshape(x, like.shape)


def reshape(x: ShapeOnly, shape: Shape) -> ShapeOnly:
    """A view, but for elements in another order: then only axes of size 1 may come and go."""
    if x.is_turned and without_ones(shape) != without_ones(x.shape):
        return x.new(shape)
    return x.view(shape, is_turned=x.is_turned)


def without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def swapaxes(x: ShapeOnly, first: int, second: int) -> ShapeOnly:
    """A view; elements keep their order where all but one axis from the first to the second have size 1."""
    sizes = list(x.shape)
    sizes[first], sizes[second] = sizes[second], sizes[first]
    low, high = sorted((first % x.ndim, second % x.ndim))
    return x.view(tuple(sizes), is_turned=x.is_turned or sum(size != 1 for size in sizes[low : high + 1]) > 1)


def cut(x: ShapeOnly, axis: int, sizes: Shape) -> list[ShapeOnly]:
    """Views, whose elements have gaps between them."""
    return [x.view((*x.shape[:axis], size, *x.shape[axis + 1 :]), is_turned=True) for size in sizes]


def join(parts: Sequence[ShapeOnly], axis: int) -> ShapeOnly:
    shape = parts[0].shape
    return parts[0].new((*shape[:axis], sum(part.shape[axis] for part in parts), *shape[axis + 1 :]))


def matmul(x: ShapeOnly, y: ShapeOnly) -> ShapeOnly:
    if x.dtype in NARROW and x.ledger.widens:
        return astype(matmul(astype(x, "float32"), astype(y, "float32")), x.dtype)
    batch = max(x.shape[:-2], y.shape[:-2], key=math.prod)
    rows, inner, columns = *x.shape[-2:], y.shape[-1]
    ledger, several = x.ledger, math.prod(batch)
    # torch lays out what is broadcast over two axes of a batch
    laid_out = [
        operand.new((*batch, *operand.shape[-2:]))
        for operand in (x, y)
        if ledger.library == "torch" and batch[:1] not in ((), (1,)) and math.prod(operand.shape[:-2]) < several
    ]
    result = x.new((*batch, rows, columns))
    del laid_out
    ledger.flops += 2 * several * rows * inner * columns
    ledger.product_bytes += x.nbytes + y.nbytes + result.nbytes
    return result


def matmul_add(x: ShapeOnly, y: ShapeOnly, z: ShapeOnly, product: float, plus: float) -> ShapeOnly:
    """In one call by torch; numpy has the product, its multiple and that of z beside one another."""
    made = matmul(x, y)
    return applied(product * made, plus * z) if made.ledger.library == "numpy" else made


def rounded(x: ShapeOnly, dtype: str) -> ShapeOnly:
    """numpy keeps the dtype: it makes distances between neighbours, and rounds multiples of them."""
    if x.ledger.library == "torch":
        return astype(x, dtype)
    if dtype == "float32":
        return astype(astype(x, "float32"), x.dtype)
    distance = spacing(x, 8, 0)
    return applied(applied(x / distance), distance)


def matrix_norm(x: ShapeOnly) -> ShapeOnly:
    (squares,) = sums(Squares(x, (-2, -1)))
    return applied(astype(squares, "float32") if x.dtype in NARROW else squares)


def divided(x: ShapeOnly, by: ShapeOnly) -> ShapeOnly:
    quotient: ShapeOnly = x / by
    return quotient


def upper(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def solve(matrix: ShapeOnly, right: ShapeOnly) -> ShapeOnly:
    rows, columns = right.shape[-2:]
    matrix.ledger.flops += math.prod(right.shape[:-2]) * rows * rows * columns
    wide = [astype(x, "float64") for x in (matrix, right)] if right.ledger.library == "numpy" else [matrix, right]
    result = wide[1].new()
    del wide
    result = astype(result, right.dtype)
    matrix.ledger.product_bytes += matrix.nbytes + right.nbytes + result.nbytes
    return result


def largest_column(x: ShapeOnly) -> ShapeOnly:
    squares = x * x
    norms = squares.new((*x.shape[:-2], 1, x.shape[-1]))
    del squares
    index = norms.new((*x.shape[:-2], 1, 1), "int64")
    return applied(index, x.new((*x.shape[:-1], 1)), dtype=x.dtype)
