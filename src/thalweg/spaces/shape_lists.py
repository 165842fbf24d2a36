"""Lists of arrays without numbers: what the foreach space would allocate.

As there, one operation on a list is done for all of its arrays before any operand is let go.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from thalweg.arrays import Axes, Scalar, Shape, Squares, Term, Truth, Value, count
from thalweg.spaces import shapes as single
from thalweg.spaces.shape_arrays import Ledger, ShapeOnly, applied

R = TypeVar("R")


def _operator(function: Callable[..., Any], *, reflected: bool = False) -> Any:
    def method(self: Any, other: Any) -> Any:
        return each(function, other, self) if reflected else each(function, self, other)

    return method


class _Arithmetic:
    """Python's operators, each applied to all arrays of a list."""

    __add__ = __radd__ = _operator(operator.add)
    __mul__ = __rmul__ = _operator(operator.mul)
    __xor__ = __rxor__ = _operator(operator.xor)
    __and__ = __rand__ = _operator(operator.and_)
    __sub__ = _operator(operator.sub)
    __truediv__ = _operator(operator.truediv)
    __rtruediv__ = _operator(operator.truediv, reflected=True)
    __pow__ = _operator(operator.pow)
    __rshift__ = _operator(operator.rshift)
    __gt__ = _operator(operator.gt)
    __ge__ = _operator(operator.ge)
    __lt__ = _operator(operator.lt)
    __le__ = _operator(operator.le)
    __eq__ = _operator(operator.eq)
    __ne__ = _operator(operator.ne)
    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Any:
        return each(operator.neg, self)

    def __rsub__(self, other: Any) -> Any:
        return each(operator.add, -self, other)

    def __bool__(self) -> bool:
        raise TypeError("a list of arrays has no single truth value")


class PerArray(_Arithmetic):
    """One number for each array of a list, as one vector."""

    def __init__(self, values: ShapeOnly) -> None:
        self.values = values


class ShapeList(_Arithmetic):
    """Arrays that are added, multiplied and compared together."""

    def __init__(self, arrays: Sequence[ShapeOnly]) -> None:
        self.arrays = tuple(arrays)

    @property
    def ledger(self) -> Ledger:
        return self.arrays[0].ledger


def each(function: Callable[..., Any], *operands: Any) -> Any:
    """One function over lists; numbers, and one number for each array, go with them."""
    length = next((len(x.arrays) for x in operands if isinstance(x, ShapeList)), None)
    if length is None:
        if not any(isinstance(x, PerArray) for x in operands):
            return function(*operands)
        return PerArray(function(*(x.values if isinstance(x, PerArray) else x for x in operands)))

    def entries(x: Any) -> Sequence[Any]:
        if isinstance(x, ShapeList):
            return x.arrays
        return [x.values[i] for i in range(length)] if isinstance(x, PerArray) else [x] * length

    return ShapeList([function(*column) for column in zip(*map(entries, operands), strict=True)])


def _lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: each(function, *operands)


sqrt = _lifted(single.sqrt)
exp = _lifted(single.exp)
log = _lifted(single.log)
expm1 = _lifted(single.expm1)
cos = _lifted(single.cos)
abs = _lifted(single.abs)
floor = _lifted(single.floor)
isfinite = _lifted(single.isfinite)
maximum = _lifted(single.maximum)
minimum = _lifted(single.minimum)
upper = _lifted(single.upper)
matmul = _lifted(single.matmul)
solve = _lifted(single.solve)
largest_column = _lifted(single.largest_column)
zeros_like = _lifted(single.zeros_like)
word = single.word


def shape(x: Any) -> Shape:
    """The shape of the first array: a rule asks only for what all of a kind have in common."""
    return () if isinstance(x, PerArray) else single.shape(x.arrays[0])


def dtype(x: Any) -> str:
    return single.dtype(x.values if isinstance(x, PerArray) else x.arrays[0])


def astype(x: Any, dtype: str) -> Any:
    return each(lambda one: single.astype(one, dtype), x)


def full(shape: Shape, value: float, like: ShapeList) -> Any:
    return each(lambda one: single.full(shape, value, one), like)


def zeros_reduced(x: ShapeList, axes: tuple[int, ...]) -> Any:
    return each(lambda one: single.zeros_reduced(one, axes), x)


def identity(size: int, like: ShapeList) -> Any:
    return each(lambda one: single.identity(size, one), like)


def positions(like: ShapeList) -> tuple[ShapeList, ShapeList]:
    low, high = zip(*(single.positions(one) for one in like.arrays), strict=True)
    return ShapeList(low), ShapeList(high)


def spacing(x: ShapeList, digits: int, lowest: int) -> Any:
    return each(lambda one: single.spacing(one, digits, lowest), x)


def where(condition: Truth, x: Value, y: Value) -> Value:
    if isinstance(condition, bool):
        return x if condition else y
    return each(single.where, condition, x, y)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(total(term, term[0], term[1]) for term in terms)


def total(term: Term, x: Any, axes: Axes) -> Any:
    if isinstance(x, PerArray):  # already one number for each array
        return PerArray(applied(x.values))
    if axes is None:
        return one_each(x)
    one = Squares if isinstance(term, Squares) else lambda *pair: pair
    return each(lambda entry: single.total(one(entry, axes)), x)


def means(*terms: Term) -> tuple[Scalar, ...]:
    def divided(result: Any, x: Any, axes: Axes) -> Any:
        return result / count(x.arrays[0].shape, axes)

    return tuple(divided(total(term, *term), *term) for term in terms)


def amax(x: ShapeList, axes: Axes) -> Scalar:
    return one_each(x) if axes is None else each(lambda one: single.amax(one, axes), x)


def one_each(x: ShapeList) -> PerArray:
    return PerArray(x.arrays[0].new((len(x.arrays),)))


def cond(condition: Any, yes: Callable[[], R], no: Callable[[], R]) -> R:
    if isinstance(condition, bool):
        return yes() if condition else no()
    ledger: Ledger = (condition.values if isinstance(condition, PerArray) else condition).ledger
    if ledger.selects:
        chosen: R = _select(condition, yes(), no())
        return chosen
    return yes() if ledger.branch else no()


def _select(condition: Any, yes: Any, no: Any) -> Any:
    if isinstance(yes, (tuple, list)):
        return type(yes)(_select(condition, a, b) for a, b in zip(yes, no, strict=True))
    return where(condition, yes, no)


def reshape(x: Any, shape: Shape) -> Any:
    return each(lambda one: single.reshape(one, shape), x)


def swapaxes(x: Any, first: int, second: int) -> Any:
    return each(lambda one: single.swapaxes(one, first, second), x)
