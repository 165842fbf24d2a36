"""The strict space: arrays that are shapes alone, to try a rule on without computing anything."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thalweg.arrays import ELEMENTWISE, Axes, Shape, Term, Truth, folded_shape, is_number, reduced_shape
from thalweg.dtypes import DTYPES
from thalweg.spaces.symbols import Run, Symbol

R = TypeVar("R")

#: What ``astype`` takes.
KNOWN_DTYPES = (*DTYPES, "bool", "int8", "uint8", "int32", "int64")


class Shaped(Symbol):
    """An array without numbers."""

    __slots__ = ("sizes",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, run: Strict, sizes: Shape) -> None:
        self.run, self.sizes = run, sizes

    def __rshift__(self, by: Any) -> Any:  # of bits
        return self.run.apply("rshift", self, by)

    def __xor__(self, other: Any) -> Any:
        return self.run.apply("xor", self, other)

    __rxor__ = __xor__


#: What a rule looks at of a shape, in rising order: nothing, the number of axes, their sizes.
NOTHING, AXES, SIZES = range(3)


class WatchedShape(tuple[int, ...]):
    """A shape that remembers what a rule looks at: other shapes may differ in all else, and are stepped alike."""

    run: Strict

    def look(self, at: int) -> None:
        self.run.looks_at = max(self.run.looks_at, at)

    def __len__(self) -> int:
        self.look(AXES)
        return super().__len__()

    def __getitem__(self, place: Any) -> Any:
        self.look(AXES if isinstance(place, slice) else SIZES)
        sizes = super().__getitem__(place)
        return self.run.shown(sizes) if isinstance(place, slice) else sizes

    def __radd__(self, other: Shape) -> Shape:
        return (*other, *self)


def looking_at_sizes(method: str) -> Callable[..., Any]:
    def look(self: WatchedShape, *others: Any) -> Any:
        self.look(SIZES)
        return getattr(tuple, method)(self, *others)

    return look


for method in ("iter", "eq", "ne", "lt", "le", "gt", "ge", "hash", "contains", "add", "mul", "rmul", "repr"):
    setattr(WatchedShape, f"__{method}__", looking_at_sizes(f"__{method}__"))
WatchedShape.index, WatchedShape.count = map(looking_at_sizes, ("index", "count"))  # type: ignore[method-assign]


class Strict(Run):
    """The space, for one run of a rule: what cannot be done with arrays of such shapes is refused, with the line."""

    looks_at = NOTHING

    def shown(self, shape: Shape) -> Shape:
        """A shape that the rule is shown."""
        looked = WatchedShape(shape)
        looked.run = self
        return looked

    def array(self, shape: Shape) -> Shaped:
        return Shaped(self, shape)

    def apply(self, op: str, *operands: Any) -> Any:
        for operand in operands:
            if not isinstance(operand, (Shaped, int, float)):
                self.refuse_operand(operand)
        return self.array(self.broadcast(*operands))

    def broadcast(self, *operands: Any) -> Shape:
        """The shape of what is computed element by element."""
        shapes = [operand.sizes for operand in operands if isinstance(operand, Shaped)]
        try:
            return broadcast(shapes)
        except ValueError as error:
            self.refuse(f"computes with {error}")

    def __getattr__(self, name: str) -> Any:
        if name in ELEMENTWISE:
            return functools.partial(self.function, name)
        return self.refuse(f"uses xp.{name}, which is no function of xp")

    def function(self, name: str, *operands: Any) -> Any:
        """An elementwise function, of arrays or of Python numbers."""
        return ELEMENTWISE[name](*operands) if all(map(is_number, operands)) else self.apply(name, *operands)

    def shape(self, x: Any) -> Shape:
        return self.shown(self.sizes_of(x))

    def sizes_of(self, x: Any) -> Shape:
        if not isinstance(x, Shaped):
            self.refuse(f"needs an array, and has a {type(x).__name__}")
        return x.sizes

    def dtype(self, x: Any) -> str:
        return "float32"

    def astype(self, x: Any, dtype: str) -> Any:
        self.check_dtype(dtype)
        return self.same(x)

    def check_dtype(self, dtype: str | None) -> None:
        if dtype is not None and dtype not in KNOWN_DTYPES:
            self.refuse(f"asks for the dtype {dtype!r}: use one of {', '.join(KNOWN_DTYPES)}")

    def same(self, x: Any, *_: Any) -> Shaped:
        """Another array of the same shape."""
        return self.array(self.sizes_of(x))

    zeros_like = spacing = bits = from_bits = same

    def full(self, shape: Shape, value: float, like: Any) -> Shaped:
        return self.array(tuple(shape))

    def zeros_reduced(self, x: Any, axes: tuple[int, ...]) -> Shaped:
        return self.reduced(x, axes)

    def identity(self, size: int, like: Any) -> Shaped:
        return self.array((size, size))

    def positions(self, like: Any) -> tuple[Shaped, Shaped]:
        return self.same(like), self.same(like)

    def word(self, n: int) -> int:
        return n

    def where(self, condition: Truth, x: Any, y: Any) -> Any:
        if isinstance(condition, bool):
            return x if condition else y
        return self.apply("where", condition, x, y)

    # ---- reductions

    def reduced(self, x: Any, axes: Axes) -> Shaped:
        sizes = self.shape_along(x, *(axes or ()))
        return self.array(() if axes is None else reduced_shape(sizes, axes))

    def shape_along(self, x: Any, *axes: int) -> Shape:
        """The shape of an array that must have these axes."""
        sizes = self.sizes_of(x)
        for axis in axes:
            if not -len(sizes) <= axis < len(sizes):
                self.refuse(f"asks for axis {axis} of an array of shape {sizes}")
        return sizes

    def sums(self, *terms: Term) -> tuple[Shaped, ...]:
        for term in terms:
            if not isinstance(term, tuple) or len(term) != 2:
                self.refuse(
                    "reduces something without axes: write pairs, such as xp.sums((x, axes)), None for all axes"
                )
        return tuple(self.reduced(x, axes) for x, axes in terms)

    means = sums

    def amax(self, x: Any, axes: Axes) -> Shaped:
        return self.reduced(x, axes)

    largest_magnitude = amax

    def mean_power(self, x: Any, power: int, unit: Any, axes: Axes) -> Shaped:
        return self.reduced(x, axes)

    def cond(self, condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
        if isinstance(condition, bool):
            return yes() if condition else no()
        first, other = yes(), no()
        if shapes_of(first) != shapes_of(other):
            self.refuse(f"has shapes {shapes_of(first)} on one side of xp.cond, and {shapes_of(other)} on the other")
        return first

    # ---- other shapes

    def reshape(self, x: Any, shape: Shape) -> Shaped:
        sizes = self.sizes_of(x)
        if math.prod(sizes) != math.prod(shape) or any(size < 0 for size in shape):
            self.refuse(f"reshapes an array of shape {sizes} to {tuple(shape)}: give all sizes, of as many elements")
        return self.array(tuple(shape))

    def reshape_like(self, x: Any, like: Any) -> Shaped:
        return self.reshape(x, self.sizes_of(like))

    def folded(self, x: Any, axis: int, size: int) -> Shaped:
        return self.reshape(x, folded_shape(self.sizes_of(x), axis, size))

    def peaks(self, x: Any, axis: int, size: int) -> Shaped:
        return self.array(self.folded(x, axis, size).sizes[:-1])

    def swapaxes(self, x: Any, first: int, second: int) -> Shaped:
        sizes = list(self.shape_along(x, first, second))
        sizes[first], sizes[second] = sizes[second], sizes[first]
        return self.array(tuple(sizes))

    def cut(self, x: Any, axis: int, sizes: Shape) -> list[Shaped]:
        shape = self.shape_along(x, axis)
        if sum(sizes) != shape[axis]:
            self.refuse(f"cuts an array of shape {shape} along axis {axis} into parts of {tuple(sizes)}")
        return [self.array(with_size(shape, axis, size)) for size in sizes]

    def join(self, parts: Sequence[Any], axis: int) -> Shaped:
        shapes = [self.shape_along(part, axis) for part in parts]
        if len({with_size(shape, axis, 0) for shape in shapes}) != 1:
            self.refuse(f"joins arrays of shapes {', '.join(map(str, shapes))} along axis {axis}")
        return self.array(with_size(shapes[0], axis, sum(shape[axis] for shape in shapes)))

    # ---- matrices

    def matrices(self, x: Any, *, are_square: bool = False) -> Shape:
        sizes = self.sizes_of(x)
        if len(sizes) < 2 or (are_square and sizes[-1] != sizes[-2]):
            self.refuse(f"needs {'square ' * are_square}matrices, and has an array of shape {sizes}")
        return sizes

    def matmul(self, x: Any, y: Any) -> Shaped:
        left, right = self.matrices(x), self.matrices(y)
        if left[-1] != right[-2]:
            self.refuse(f"multiplies matrices of shapes {left} and {right}")
        return self.array((*self.broadcast(self.array(left[:-2]), self.array(right[:-2])), left[-2], right[-1]))

    def matmul_add(self, x: Any, y: Any, z: Any, product: float, plus: float) -> Any:
        return self.apply("add", self.matmul(x, y), z)

    matmul_symmetric, matmul_add_symmetric = matmul, matmul_add

    def in_precision(self, precision: str) -> Strict:
        if precision not in ("float32", "tf32"):
            self.refuse(f"asks for products in the precision {precision!r}: use 'float32' or 'tf32'")
        return self

    def matmul_rounded(self, x: Any, y: Any, dtype: str) -> Shaped:
        self.check_dtype(dtype)
        return self.matmul(x, y)

    rounded = astype

    def square(self, x: Any, *_: Any) -> Shaped:
        return self.array(self.matrices(x, are_square=True))

    add_identity = eigenvectors = orthonormal = square

    def upper(self, x: Any) -> Shaped:
        return self.array(self.matrices(x))

    def matrix_norm(self, x: Any) -> Shaped:
        return self.array((*self.matrices(x)[:-2], 1, 1))

    def divided(self, x: Any, by: Any, dtype: str | None) -> Any:
        self.check_dtype(dtype)
        return self.apply("div", x, by)

    def combined(self, *terms: tuple[Any, Any]) -> Any:
        return functools.reduce(
            functools.partial(self.apply, "add"), [self.apply("mul", number, x) for number, x in terms]
        )

    def solve(self, matrix: Any, right: Any) -> Shaped:
        self.matmul(self.square(matrix), right)
        return self.same(right)

    def arrange(self, x: Any, by: Any, axis: int) -> Shaped:
        sizes = self.shape_along(x, 0, axis)
        if self.sizes_of(by) != (sizes[0], sizes[axis]):
            self.refuse(f"arranges axis {axis} of an array of shape {sizes} by numbers of shape {by.sizes}")
        return self.same(x)

    def largest_column(self, x: Any) -> Shaped:
        return self.array((*self.matrices(x)[:-1], 1))


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The shape of what is computed of arrays element by element."""
    ndim = max(map(len, shapes), default=0)
    padded = [(1,) * (ndim - len(shape)) + tuple(shape) for shape in shapes]
    sizes = [next((size for size in along if size != 1), 1) for along in zip(*padded, strict=True)]
    if any(size not in (1, most) for shape in padded for size, most in zip(shape, sizes, strict=True)):
        raise ValueError(f"shapes {' and '.join(map(str, dict.fromkeys(shapes)))}, which do not go together")
    return tuple(sizes)


def with_size(shape: Shape, axis: int, size: int) -> Shape:
    """The shape with another size along an axis."""
    return tuple(size if place == axis % len(shape) else n for place, n in enumerate(shape))


def shapes_of(value: Any) -> Any:
    """The shapes of all arrays in nested tuples, lists and dicts; a number has that of one."""
    if isinstance(value, dict):
        return {key: shapes_of(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [shapes_of(part) for part in value]
    return value.sizes if isinstance(value, Shaped) else ()
