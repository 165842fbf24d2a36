"""All that a rule may ask of an array library.

A *space* is an array library seen through the functions below. Rules receive one as ``xp`` and
use nothing else, so that one rule source runs on numpy, on jax under ``jit``, on torch, on lists
of torch tensors, and on whatever space comes next. Modules satisfy :class:`Space` as well as
objects do: ``thalweg.spaces.numpy`` itself is a space.

Every function that takes arrays elementwise also takes plain Python numbers, and answers those
with plain Python numbers, computed in double precision. So what a rule derives from the step
count and the options is exact where it can be, and becomes part of a traced program where it
must be.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar

T = TypeVar("T")


class Array(Protocol):
    """Something that does arithmetic; what exactly is the space's affair."""

    def __add__(self: T, other: Any, /) -> T: ...
    def __radd__(self: T, other: Any, /) -> T: ...
    def __sub__(self: T, other: Any, /) -> T: ...
    def __rsub__(self: T, other: Any, /) -> T: ...
    def __mul__(self: T, other: Any, /) -> T: ...
    def __rmul__(self: T, other: Any, /) -> T: ...
    def __truediv__(self: T, other: Any, /) -> T: ...
    def __rtruediv__(self: T, other: Any, /) -> T: ...
    def __neg__(self: T) -> T: ...
    def __pow__(self: T, other: Any, /) -> T: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)
R = TypeVar("R")

#: A number, or something of the space that behaves like one: a traced value, a 0-d tensor.
Scalar: TypeAlias = Annotated[Any, "Scalar"]
#: An array or a number: what elementwise functions take and give.
Value: TypeAlias = Any
#: A truth value of the space: a bool, or an array of them.
Truth: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]
#: Axes to reduce over; None means all of them.
Axes: TypeAlias = tuple[int, ...] | None
#: What is kept for one parameter between steps, under its checkpoint keys.
State: TypeAlias = dict[str, A]


class Squares(NamedTuple):
    """A term of ``sums`` and ``means``: the squares of x, which need not be stored for it."""

    x: Any
    axes: Axes


#: What is to be summed: (x, axes), or Squares(x, axes).
Term: TypeAlias = tuple[Any, Axes] | Squares


class Space(Protocol[A]):
    """An array library, as far as rules are concerned."""

    # what an array is
    def shape(self, x: A) -> Shape: ...
    def dtype(self, x: A) -> str: ...
    def astype(self, x: A, dtype: str) -> A: ...

    # making arrays; dtype and place follow ``like``
    def full(self, shape: Shape, value: float, like: A) -> A: ...
    def zeros_like(self, x: A) -> A: ...
    def zeros_reduced(self, x: A, axes: tuple[int, ...]) -> A:
        """Zeros of x's shape, with size 1 along ``axes``."""
        ...

    def identity(self, size: int, like: A) -> A: ...
    def positions(self, like: A) -> tuple[Any, Any]:
        """Low and high 32 bits of each element's position in the whole, flattened tensor.

        The integers must wrap or be wide enough that the low 32 bits of products are right.
        """
        ...

    def word(self, n: int) -> Any:
        """A number below 2**32 that goes with ``positions`` in arithmetic."""
        ...

    # elementwise
    def sqrt(self, x: Value) -> Value: ...
    def exp(self, x: Value) -> Value: ...
    def log(self, x: Value) -> Value: ...
    def expm1(self, x: Value) -> Value: ...
    def cos(self, x: Value) -> Value: ...
    def abs(self, x: Value) -> Value: ...
    def floor(self, x: Value) -> Value: ...
    def spacing(self, x: A, digits: int, lowest: int) -> A:
        """The distance between neighbours of x among numbers of so many binary digits.

        That is 2**(max(e, lowest) - digits), for x = m * 2**e with 0.5 <= abs(m) < 1.
        """
        ...

    def bits(self, x: A) -> A:
        """The bits of float32 numbers, as int32."""
        ...

    def from_bits(self, x: A) -> A:
        """The float32 numbers that have these bits."""
        ...

    def isfinite(self, x: Value) -> Truth: ...
    def maximum(self, x: Value, y: Value) -> Value: ...
    def minimum(self, x: Value, y: Value) -> Value: ...
    def where(self, condition: Truth, x: Value, y: Value) -> Value: ...

    # reductions: results broadcast against x (reduced axes keep size 1; None gives a scalar)
    def sums(self, *terms: Term) -> tuple[Scalar, ...]:
        """Sum each term over its axes. One call is one round of communication when sharded."""
        ...

    def means(self, *terms: Term) -> tuple[Scalar, ...]:
        """Average each term over its axes; the average of nothing is 0."""
        ...

    def amax(self, x: A, axes: Axes) -> Scalar: ...
    def largest_magnitude(self, x: A, axes: Axes) -> Scalar:
        """``amax(abs(x), axes)``."""
        ...

    # a branch on a value: takes one side where the value is known, selects where it is traced
    def cond(self, condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R: ...

    # groups of neighbours, for codecs
    def folded(self, x: A, axis: int, size: int) -> A:
        """x with the axes from ``axis`` on seen as two, of which the last has this size."""
        ...

    def peaks(self, x: A, axis: int, size: int) -> A:
        """The largest magnitude in each of these groups, NaN if one is in it, without the last axis."""
        ...

    def reshape_like(self, x: A, like: A) -> A: ...

    # matrices, for the last two axes of (..., m, n)
    def reshape(self, x: A, shape: Shape) -> A: ...
    def swapaxes(self, x: A, first: int, second: int) -> A: ...
    def cut(self, x: A, axis: int, sizes: Shape) -> Sequence[A]:
        """Parts of x that lie side by side along an axis and have these sizes."""
        ...

    def join(self, parts: Sequence[A], axis: int) -> A:
        """Arrays put side by side along an axis."""
        ...

    def in_precision(self, precision: str) -> Space[A]:
        """This space with products of float32 in this precision: "float32", or "tf32" where the device has it."""
        ...

    def matmul(self, x: A, y: A) -> A: ...
    def matmul_add(self, x: A, y: A, z: A, product: float, plus: float) -> A:
        """product * (x @ y) + plus * z, rounded once to the dtype of these arrays, which they share."""
        ...

    def matmul_rounded(self, x: A, y: A, dtype: str) -> A:
        """x @ y, ``rounded`` to a dtype that may be another than theirs."""
        ...

    def matmul_symmetric(self, x: A, y: A) -> A:
        """x @ y where the product is known to be symmetric: one half of it need not be computed."""
        ...

    def matmul_add_symmetric(self, x: A, y: A, z: A, product: float, plus: float) -> A:
        """product * (x @ y) + plus * z where x @ y and z are known to be symmetric."""
        ...

    def rounded(self, x: A, dtype: str) -> A:
        """x with no more digits than a dtype has; in that dtype where the library multiplies matrices in it."""
        ...

    def add_identity(self, x: A, a: float) -> A:
        """x + a I, for square matrices."""
        ...

    def matrix_norm(self, x: A) -> A:
        """The Frobenius norm of each matrix, as (..., 1, 1), in float32 if x is in a narrower dtype."""
        ...

    def divided(self, x: A, by: A, dtype: str | None) -> A:
        """x / by, with one number for each slice: (b, 1, ...); ``rounded`` once to a dtype, unless that is None."""
        ...

    def combined(self, *terms: tuple[Scalar, A]) -> Value:
        """The sum of arrays of one shape, each multiplied by a number, or by one for each slice: (b, 1, ...)."""
        ...

    def upper(self, x: A) -> A: ...
    def solve(self, matrix: A, right: A) -> A:
        """X with ``matrix @ X = right`` for a lower triangular matrix; NaN where singular."""
        ...

    def eigenvectors(self, x: A) -> A:
        """Those of symmetric matrices, as columns; that of the largest eigenvalue comes first."""
        ...

    def orthonormal(self, x: A) -> A:
        """Q of the QR decomposition of square matrices."""
        ...

    def arrange(self, x: A, by: A, axis: int) -> A:
        """The slices of x, (b, ...), along an axis in the order of falling numbers ``by``, (b, n)."""
        ...

    def mean_power(self, x: A, power: int, unit: Scalar, axes: tuple[int, ...]) -> Scalar:
        """The mean of ``abs(x / unit) ** power``, with the power 1 or 4 and one unit for each slice: (b, 1, ...)."""
        ...

    def largest_column(self, x: A) -> A:
        """The column of largest norm (the first of equals) as (..., m, 1), whatever the magnitudes are."""
        ...


def is_number(x: object) -> bool:
    """Whether x is a plain Python number (then Python's own arithmetic serves it)."""
    return type(x) in (int, float, bool)  # exactly: numpy's float64 is a float, and is an array


def number_log(x: float) -> float:
    """The logarithm with log(0) = -inf, as array libraries have it."""
    return math.log(x) if x > 0 else (-math.inf if x == 0 else math.nan)


def number_maximum(x: float, y: float) -> float:
    """The larger of two, NaN if either is, as array libraries have it; Python's own depends on their order."""
    return x if x > y or x != x else y


def number_minimum(x: float, y: float) -> float:
    return x if x < y or x != x else y


#: Functions of elements, with what they are of Python numbers, in the order in which spaces define them.
ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "sqrt": math.sqrt,
    "exp": math.exp,
    "log": number_log,
    "expm1": math.expm1,
    "cos": math.cos,
    "floor": math.floor,
    "isfinite": math.isfinite,
    "maximum": number_maximum,
    "minimum": number_minimum,
}


def elementwise(of_arrays: Callable[[str], Callable[..., Any]]) -> list[Callable[..., Any]]:
    """The functions of elements of a space, by those that its library has, by name, for arrays."""

    def function(of_numbers: Callable[..., Any], of_arrays: Callable[..., Any]) -> Callable[..., Any]:
        def apply(*operands: Any) -> Any:
            chosen = of_numbers if all(is_number(x) for x in operands) else of_arrays
            return chosen(*operands)

        return apply

    return [function(of_numbers, of_arrays(name)) for name, of_numbers in ELEMENTWISE.items()]


def combine(*terms: tuple[Any, Any]) -> Any:
    """The sum of arrays, each multiplied by a number."""
    (number, x), *others = terms
    total = x if is_number(number) and number == 1 else number * x
    for number, x in others:
        total = total + number * x
    return total


def derived(space: Any, select: Callable[..., Any]) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The functions of a space that follow from its others: in every library, and where it has nothing better.

    select: ``where`` of the library, for conditions that are arrays.
    """

    def where(condition: Truth, x: Value, y: Value) -> Value:
        if isinstance(condition, bool):
            return x if condition else y
        return select(condition, x, y)

    def reshape(x: Any, shape: Shape) -> Any:
        return x.reshape(shape)

    def folded(x: Any, axis: int, size: int) -> Any:
        return x.reshape(folded_shape(space.shape(x), axis, size))

    def reshape_like(x: Any, like: Any) -> Any:
        return x.reshape(like.shape)

    def matmul_rounded(x: Any, y: Any, dtype: str) -> Any:
        return space.rounded(space.matmul(x, y), dtype)

    def divided(x: Any, by: Any, dtype: str | None) -> Any:
        if dtype in (None, space.dtype(x)):
            return x / by
        return space.rounded(widened(x) / widened(by), dtype)

    def largest_magnitude(x: Any, axes: Axes) -> Any:
        return space.amax(space.abs(x), axes)

    def mean_power(x: Any, power: int, unit: Any, axes: tuple[int, ...]) -> Any:
        small = x if is_number(unit) and unit == 1 else space.divided(x, unit, None)
        return space.means((space.abs(small), axes) if power == 1 else Squares(small * small, axes))[0]

    def widened(x: Any) -> Any:
        return x if space.dtype(x) == "float64" else space.astype(x, "float32")

    def word(n: int) -> int:
        return n

    def zeros_reduced(x: Any, axes: tuple[int, ...]) -> Any:
        return space.full(reduced_shape(space.shape(x), axes), 0.0, x)

    def matrix_norm(x: Any) -> Any:
        return space.sqrt(space.sums(Squares(widened(x), (-2, -1)))[0])

    def add_identity(x: Any, a: float) -> Any:
        return x + a * space.identity(x.shape[-1], x)

    def means(*terms: Term) -> tuple[Scalar, ...]:
        return tuple(total / count(x.shape, axes) for total, (x, axes) in zip(space.sums(*terms), terms, strict=True))

    always: list[Callable[..., Any]] = [where, reshape, folded, reshape_like, matmul_rounded, divided, mean_power]
    return always, [word, zeros_reduced, matrix_norm, add_identity, means, largest_magnitude, combine]


#: The products of a space that are made in the precision that a rule asks for.
PRODUCTS = ("matmul", "matmul_symmetric", "matmul_add", "matmul_add_symmetric")


def in_precisions(space: Mapping[str, Any], products: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """A space, the functions of a module by name, with products in each precision. The products take ``precision``."""

    def make(precision: str) -> SimpleNamespace:
        made: dict[str, Any] = {name: functools.partial(products[name], precision=precision) for name in PRODUCTS}
        made["matmul_rounded"] = lambda x, y, dtype: space["rounded"](made["matmul"](x, y), dtype)
        return SimpleNamespace(**{**space, **made})

    return {precision: make(precision) for precision in ("float32", "tf32")}


def shape_along(shape: Shape, axis: int) -> Shape:
    """The shape of numbers, some for each of a batch, that go with x along an axis."""
    return tuple(n if i in (0, axis) else 1 for i, n in enumerate(shape))


def reduced_shape(shape: Shape, axes: Sequence[int]) -> Shape:
    """The shape with size 1 along the axes."""
    gone = {axis % len(shape) for axis in axes} if shape else set()
    return tuple(1 if axis in gone else size for axis, size in enumerate(shape))


def folded_shape(shape: Shape, axis: int, size: int) -> Shape:
    """The shape with the axes from ``axis`` on as two, of which the last has this size."""
    return (*shape[:axis], math.prod(shape[axis:]) // size, size)


def count(shape: Shape, axes: Axes) -> int:
    """How many elements are reduced to one; at least 1, so that a mean of nothing is 0."""
    return max(1, math.prod(shape if axes is None else [shape[axis] for axis in axes]))
