"""The space of shapes: arrays without numbers, to learn what a rule would do, keep and allocate, without doing it.

A meter knows how many bytes such arrays take together, now and at most. They come and go as Python's references to
them do, just as those of numpy and torch. Operations are counted as if each wrote a new array, so that what a meter
found at most is a bound: numpy writes some sums over an operand that nothing else refers to.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
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
Library: TypeAlias = Literal["numpy", "torch"]

BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
#: Of two dtypes in one operation, the later one is the result's.
ORDER = tuple(BYTES)
#: Memory comes in blocks, on GPUs of this many bytes.
BLOCK = 512


class Reduction(NamedTuple):
    """A sum or a maximum that was asked for."""

    kind: str
    #: Of what was reduced, and along which axes.
    shape: Shape
    dtype: str
    axes: Axes


class Meter:
    """What some arrays take together, and the products and reductions that they went through."""

    def __init__(
        self, library: Library = "torch", *, selects: bool = False, branch: bool = True, widens: bool = False
    ) -> None:
        #: Whose operations are counted.
        self.library = library
        #: Whether products of 16 bits are made in float32, as on CPUs.
        self.widens = widens
        #: Whether both sides of a branch are computed, because the host does not know which is asked for.
        self.selects = selects
        #: Which side is taken otherwise.
        self.branch = branch
        #: Bytes that are alive now, were when counting began, and have been at most since then.
        self.live = self.start = self.most = 0
        #: Floating point operations of matrix products, and bytes of their operands and results.
        self.flops = self.product_bytes = 0
        #: What was reduced, together where it was asked for together.
        self.reductions: list[list[Reduction]] = []

    def begin(self) -> None:
        """Take what is alive now for what was there before."""
        self.start = self.most = self.live

    @property
    def extra(self) -> int:
        """The most that has been alive at once, beyond what was there at the beginning."""
        return self.most - self.start

    def array(self, shape: Shape, dtype: str) -> ShapeOnly:
        size = math.prod(shape) * BYTES[dtype]
        return ShapeOnly(shape, dtype, Memory(self, -(-size // BLOCK) * BLOCK))


class Memory:
    """What an array and the views of it take. It is freed with the last of them."""

    __slots__ = ("meter", "size")

    def __init__(self, meter: Meter, size: int) -> None:
        self.meter, self.size = meter, size
        meter.live += size
        meter.most = max(meter.most, meter.live)

    def __del__(self) -> None:
        self.meter.live -= self.size


def _operator(dtype: str | None = None) -> Callable[..., Any]:
    def method(x: ShapeOnly, *other: Any) -> Any:
        (y,) = other or (x,)
        return apply(x, y, dtype=dtype) if isinstance(y, (ShapeOnly, int, float)) else NotImplemented

    return method


class ShapeOnly:
    """An array without numbers."""

    __slots__ = ("dtype", "is_turned", "memory", "shape")

    def __init__(self, shape: Shape, dtype: str, memory: Memory, *, is_turned: bool = False) -> None:
        self.shape, self.dtype, self.memory = shape, dtype, memory
        #: Whether it is a view of an array that has its elements in another order.
        self.is_turned = is_turned

    @property
    def meter(self) -> Meter:
        return self.memory.meter

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def new(self, shape: Shape | None = None, dtype: str | None = None) -> ShapeOnly:
        return self.meter.array(self.shape if shape is None else shape, dtype or self.dtype)

    def view(self, shape: Shape, *, is_turned: bool = False, dtype: str | None = None) -> ShapeOnly:
        return ShapeOnly(shape, dtype or self.dtype, self.memory, is_turned=is_turned)

    def __getitem__(self, index: int) -> ShapeOnly:
        return self.view(self.shape[1:], is_turned=self.is_turned)

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
    of_numbers = "float64" if condition.meter.library == "numpy" else "float32"
    return apply(condition, x, y, dtype=kinds[0] if kinds else of_numbers)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    note("sum", *terms)
    return tuple(astype(total(term), term[0].dtype) for term in terms)


def means(*terms: Term) -> tuple[Scalar, ...]:
    note("sum", *terms)
    return tuple(astype(total(term) / count(term[0].shape, term[1]), term[0].dtype) for term in terms)


def note(kind: str, *terms: Any) -> None:
    """Tell the meter of reductions that are asked for together."""
    if terms:
        found = [Reduction(kind, own.shape, own.dtype, axes) for own, axes in terms]
        terms[0][0].meter.reductions.append(found)


def total(term: Term) -> Any:
    """numpy stores squares before it sums them, in float64; torch has norms."""
    x, axes = term
    by_numpy = x.meter.library == "numpy"
    values = x * x if isinstance(term, Squares) and (by_numpy or axes == ()) else x
    shape = () if axes is None else reduced_shape(x.shape, axes)
    return values.new(shape, "float64" if by_numpy and axes else None)


def amax(x: ShapeOnly, axes: Axes) -> Scalar:
    note("max", (x, axes))
    return x.new(() if axes is None else reduced_shape(x.shape, axes))


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    """The side that the meter says; both, and a choice between them, if it says that the host does not know."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    if condition.meter.selects:
        chosen: R = select(condition, yes(), no())
        return chosen
    return yes() if condition.meter.branch else no()


def select(condition: ShapeOnly, yes: Any, no: Any) -> Any:
    if isinstance(yes, (tuple, list)):
        return type(yes)(select(condition, a, b) for a, b in zip(yes, no, strict=True))
    return where(condition, yes, no)


def folded(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return reshape(x, folded_shape(x.shape, axis, size))


def peaks(x: ShapeOnly, axis: int, size: int) -> ShapeOnly:
    return apply(folded(x, axis, size)).new(folded_shape(x.shape, axis, size)[:-1])


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
    if x.dtype in NARROW and x.meter.widens:
        return astype(matmul(astype(x, "float32"), astype(y, "float32")), x.dtype)
    batch = max(x.shape[:-2], y.shape[:-2], key=math.prod)
    rows, inner, columns = *x.shape[-2:], y.shape[-1]
    meter, several = x.meter, math.prod(batch)
    # torch lays out what is broadcast over two axes of a batch
    laid_out = [
        operand.new((*batch, *operand.shape[-2:]))
        for operand in (x, y)
        if meter.library == "torch" and batch[:1] not in ((), (1,)) and math.prod(operand.shape[:-2]) < several
    ]
    result = x.new((*batch, rows, columns))
    del laid_out
    meter.flops += 2 * several * rows * inner * columns
    meter.product_bytes += x.nbytes + y.nbytes + result.nbytes
    return result


def matmul_add(x: ShapeOnly, y: ShapeOnly, z: ShapeOnly, product: float, plus: float) -> ShapeOnly:
    """In one call by torch for a batch; else there are the product, its multiple and that of z beside one another."""
    if x.dtype in NARROW and x.meter.widens:
        wide = [astype(own, "float32") for own in (x, y, z)]
        return astype(matmul_add(wide[0], wide[1], wide[2], product, plus), x.dtype)
    made = matmul(x, y)
    return made if made.meter.library == "torch" and x.ndim == 3 else apply(product * made, plus * z)


matmul_symmetric, matmul_add_symmetric = matmul, matmul_add


def matmul_rounded(x: ShapeOnly, y: ShapeOnly, dtype: str) -> ShapeOnly:
    return rounded(matmul(x, y), dtype)


def add_identity(x: ShapeOnly, a: float) -> ShapeOnly:
    return x.new()


def rounded(x: ShapeOnly, dtype: str) -> ShapeOnly:
    """numpy keeps the dtype: it makes distances between neighbours, and rounds multiples of them."""
    if x.meter.library == "torch":
        return astype(x, dtype)
    if dtype == "float32":
        return astype(astype(x, "float32"), x.dtype)
    distance = spacing(x, 8, 0)
    return apply(apply(x / distance), distance)


def matrix_norm(x: ShapeOnly) -> ShapeOnly:
    (squares,) = sums(Squares(x, (-2, -1)))
    return apply(astype(squares, "float32") if x.dtype in NARROW else squares)


def divided(x: ShapeOnly, by: ShapeOnly, dtype: str | None) -> ShapeOnly:
    quotient: ShapeOnly = x / by
    return quotient if dtype is None else rounded(quotient, dtype)


def upper(x: ShapeOnly) -> ShapeOnly:
    return x.new()


def solve(matrix: ShapeOnly, right: ShapeOnly) -> ShapeOnly:
    rows, columns = right.shape[-2:]
    matrix.meter.flops += math.prod(right.shape[:-2]) * rows * rows * columns
    wide = [astype(x, "float64") for x in (matrix, right)] if right.meter.library == "numpy" else [matrix, right]
    result = wide[1].new()
    del wide
    result = astype(result, right.dtype)
    matrix.meter.product_bytes += matrix.nbytes + right.nbytes + result.nbytes
    return result


def eigenvectors(x: ShapeOnly) -> ShapeOnly:
    """Beside the result there is a copy of x, and work that is as large."""
    work = x.new(), x.new()
    del work
    return x.new()


def orthonormal(x: ShapeOnly) -> ShapeOnly:
    """R and Householder's vectors are there too."""
    n = x.shape[-1]
    x.meter.flops += 8 * math.prod(x.shape) * n // 3
    work = x.new(), x.new()
    del work
    return x.new()


def arrange(x: ShapeOnly, by: ShapeOnly, axis: int) -> ShapeOnly:
    by.new(dtype="int64")
    return x.new()


def largest_column(x: ShapeOnly) -> ShapeOnly:
    squares = x * x
    norms = squares.new((*x.shape[:-2], 1, x.shape[-1]))
    del squares
    index = norms.new((*x.shape[:-2], 1, 1), "int64")
    return apply(index, x.new((*x.shape[:-1], 1)), dtype=x.dtype)
