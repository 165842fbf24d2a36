"""The space of shapes: arrays without numbers, to learn what a rule would keep and allocate, without allocating it.

What each function allocates on its way to a result is what those of ``spaces.numpy`` and ``spaces.torch`` do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    number_function,
    number_log,
    number_maximum,
    number_minimum,
    reduced_shape,
)
from thalweg.spaces.shape_arrays import Ledger, ShapeOnly, applied

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
    ones = x.new() if x.ledger.library == "torch" else x.new(())
    mantissa, exponent = x.new(), x.new(dtype="int32")
    del mantissa
    exponent = maximum(exponent, lowest) - digits
    if x.ledger.library == "torch":  # which multiplies by powers of 2
        return applied(ones, x.new())
    return applied(ones, exponent, dtype=x.dtype)


def where(condition: Truth, x: Value, y: Value) -> Value:
    if isinstance(condition, bool):
        return x if condition else y
    kinds = [value.dtype for value in (x, y) if isinstance(value, ShapeOnly)]
    return applied(condition, x, y, dtype=kinds[0] if kinds else "float32")


def sums(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(astype(total(term), term[0].dtype) for term in terms)


def means(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(astype(total(term) / count(term[0].shape, term[1]), term[0].dtype) for term in terms)


def total(term: Term) -> Any:
    """numpy stores squares and sums in float64, a sum of everything as a plain number; torch has norms."""
    x, axes = term
    by_numpy = x.ledger.library == "numpy"
    values = x * x if isinstance(term, Squares) and (by_numpy or axes == ()) else x
    result = values.new(() if axes is None else reduced_shape(x.shape, axes), "float64" if by_numpy and axes else None)
    result.is_plain = by_numpy and axes is None
    return result


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


def reshape(x: ShapeOnly, shape: Shape) -> ShapeOnly:
    """A view where the order of elements allows one, else a copy."""
    if x.strides is None:
        return x.view(shape, None)
    strides = strides_seen(x.shape, x.strides, shape)
    return x.new(shape) if strides is None else x.view(shape, strides)


def strides_seen(old: Shape, strides: Shape, new: Shape) -> Shape | None:
    """The strides of the same elements in another shape, or None if there are none."""
    if math.prod(old) == 0:
        return c_order(new)
    # runs of old axes that lie in one another, as (elements, stride of the last)
    runs: list[list[int]] = []
    for size, stride in zip(old, strides, strict=True):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = [runs[-1][0] * size, stride]
        else:
            runs.append([size, stride])
    found: list[int] = []
    for size in reversed(new):
        if size == 1:
            found.append(1)
            continue
        while runs and runs[-1][0] == 1:
            runs.pop()
        if not runs or runs[-1][0] % size:
            return None
        found.append(runs[-1][1])
        runs[-1] = [runs[-1][0] // size, runs[-1][1] * size]
    return tuple(reversed(found))


def c_order(shape: Shape) -> Shape:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def swapaxes(x: ShapeOnly, first: int, second: int) -> ShapeOnly:
    sizes, strides = list(x.shape), list(x.strides or c_order(x.shape))
    for values in (sizes, strides):
        values[first], values[second] = values[second], values[first]
    turned = tuple(strides)
    return x.view(tuple(sizes), None if turned == c_order(tuple(sizes)) else turned)


def matmul(x: ShapeOnly, y: ShapeOnly) -> ShapeOnly:
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


def upper(x: ShapeOnly) -> ShapeOnly:
    mask = x.new(x.shape[-2:], "bool") if x.ledger.library == "numpy" else None
    result = x.new()
    del mask
    return result


def solve(matrix: ShapeOnly, right: ShapeOnly) -> ShapeOnly:
    rows, columns = right.shape[-2:]
    matrix.ledger.flops += math.prod(right.shape[:-2]) * rows * rows * columns
    if right.ledger.library == "numpy":  # which solves in float64
        wide = [astype(x, "float64") for x in (matrix, right)]
        result = right.new(dtype="float64")
        del wide
        result = astype(result, right.dtype)
    else:
        result = right.new()
    matrix.ledger.product_bytes += matrix.nbytes + right.nbytes + result.nbytes
    return result


def largest_column(x: ShapeOnly) -> ShapeOnly:
    squares = x * x
    norms = squares.new((*x.shape[:-2], 1, x.shape[-1]))
    del squares
    index = norms.new((*x.shape[:-2], 1, 1), "int64")
    return applied(index, x.new((*x.shape[:-1], 1)), dtype=x.dtype)


def array(ledger: Ledger, shape: Shape, dtype: str) -> ShapeOnly:
    """An array to begin with."""
    return ledger.array(shape, dtype)
