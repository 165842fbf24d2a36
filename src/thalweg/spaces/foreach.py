"""The foreach space: a list of torch tensors that does arithmetic.

One operation on a :class:`TensorList` is one launch for the whole list wherever torch has a
``_foreach`` operation for it. Tensors in a list may differ in shape as long as a rule treats them
alike (``Rule.kind``). Whole-tensor sums come as :class:`PerTensor`, one vector with an entry for
each tensor, so that the scalar arithmetic of a rule is a few launches, not a few for each tensor.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thalweg.arrays import (
    ELEMENTWISE,
    PRODUCTS,
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    Value,
    combine,
    count,
    in_precisions,
    is_number,
)
from thalweg.spaces import torch as single
from thalweg.spaces.torch_sums import plain, squares_of_each

R = TypeVar("R")


def _lift(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: _apply(function, *operands)


class _Arithmetic:
    """Python's operators, by ``_apply``."""

    __add__ = __radd__ = _lift(operator.add)
    __mul__ = __rmul__ = _lift(operator.mul)
    __sub__ = _lift(operator.sub)
    __truediv__ = _lift(operator.truediv)
    __neg__, __abs__ = _lift(operator.neg), _lift(single.abs)
    __pow__ = _lift(operator.pow)
    __gt__, __ge__ = _lift(operator.gt), _lift(operator.ge)
    __lt__, __le__ = _lift(operator.lt), _lift(operator.le)
    __eq__, __ne__ = _lift(operator.eq), _lift(operator.ne)
    __and__ = _lift(operator.and_)
    __xor__ = __rxor__ = _lift(operator.xor)
    __rshift__ = _lift(operator.rshift)
    __hash__ = None  # type: ignore[assignment]

    def __rsub__(self, other: Any) -> Any:
        return _apply(operator.add, -self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return _apply(operator.mul, _apply(torch.reciprocal, self), other)

    def __rpow__(self, other: Any) -> Any:
        return _apply(lambda x, y: y**x, self, other)

    def __bool__(self) -> bool:
        raise TypeError("a list of tensors has no single truth value")


class PerTensor(_Arithmetic):
    """One number for each tensor of a list, as one vector."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class TensorList(_Arithmetic):
    """A list of tensors that are added, multiplied and compared together."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)


#: Operations that torch can launch once for a whole list.
_FOREACH: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.add: torch._foreach_add,
    operator.sub: torch._foreach_sub,
    operator.mul: torch._foreach_mul,
    operator.truediv: torch._foreach_div,
    operator.neg: torch._foreach_neg,
    torch.reciprocal: torch._foreach_reciprocal,
    single.sqrt: torch._foreach_sqrt,
    single.exp: torch._foreach_exp,
    single.expm1: torch._foreach_expm1,
    single.log: torch._foreach_log,
    single.cos: torch._foreach_cos,
    single.abs: torch._foreach_abs,
    single.floor: torch._foreach_floor,
    single.maximum: torch._foreach_clamp_min,
    single.minimum: torch._foreach_clamp_max,
}


_COMMUTES = (operator.add, operator.mul)


def _apply(function: Callable[..., Any], x: Any, *others: Any) -> Any:
    """One function over a list: in one launch if possible, else tensor by tensor."""
    operands = (x, *others)
    lists = [operand for operand in operands if isinstance(operand, TensorList)]
    if not lists:
        if not any(isinstance(operand, PerTensor) for operand in operands):
            return function(*operands)
        return PerTensor(
            function(*(operand.values if isinstance(operand, PerTensor) else operand for operand in operands))
        )
    length = len(lists[0].tensors)

    def entries(operand: Any) -> Sequence[Any]:
        if isinstance(operand, TensorList):
            return operand.tensors
        return operand.values.unbind() if isinstance(operand, PerTensor) else [operand] * length

    if function in _COMMUTES and not isinstance(x, TensorList):
        return _apply(function, *reversed(operands))
    if length and x is lists[0] and function in _FOREACH:
        rest = [operand if is_number(operand) else list(entries(operand)) for operand in others]
        return TensorList(_FOREACH[function](x.tensors, *rest))
    return TensorList([function(*column) for column in zip(*map(entries, operands), strict=True)])


abs, sqrt, exp, log, expm1, cos, floor, isfinite, maximum, minimum = (
    _lift(getattr(single, name)) for name in ELEMENTWISE
)
full = _lift(single.full)
zeros_like = _lift(single.zeros_like)
zeros_reduced = _lift(single.zeros_reduced)
identity = _lift(single.identity)


def astype(x: Any, to: str) -> Any:
    wanted = getattr(torch, to)
    if isinstance(x, TensorList) and all(tensor.dtype is wanted for tensor in x.tensors):
        return x
    return _apply(single.astype, x, to)


spacing = _lift(single.spacing)
bits = _lift(single.bits)
from_bits = _lift(single.from_bits)
folded = _lift(single.folded)
peaks = _lift(single.peaks)
reshape_like = _lift(single.reshape_like)
reshape = _lift(single.reshape)
swapaxes = _lift(single.swapaxes)
upper = _lift(single.upper)
solve = _lift(single.solve)
matmul = _lift(single.matmul)
matmul_add = _lift(single.matmul_add)
matmul_symmetric = _lift(single.matmul_symmetric)
matmul_add_symmetric = _lift(single.matmul_add_symmetric)
matmul_rounded = _lift(single.matmul_rounded)
add_identity = _lift(single.add_identity)
matrix_norm = _lift(single.matrix_norm)
divided = _lift(single.divided)
eigenvectors = _lift(single.eigenvectors)
orthonormal = _lift(single.orthonormal)
arrange = _lift(single.arrange)
largest_column, mean_power = _lift(single.largest_column), _lift(single.mean_power)
rounded, word = astype, single.word
combined = combine


def in_precision(precision: str) -> Any:
    return IN_PRECISION[precision]


def where(condition: Truth, x: Value, y: Value) -> Value:
    if isinstance(condition, bool):
        return x if condition else y
    return _apply(single.where, condition, x, y)


def shape(x: Any) -> Shape:
    """The shape of the first tensor: a rule asks only for what all of a kind have in common."""
    return single.shape(x.values[0]) if isinstance(x, PerTensor) else single.shape(x.tensors[0])


def dtype(x: Any) -> str:
    return single.dtype(x.values if isinstance(x, PerTensor) else x.tensors[0])


def positions(like: TensorList) -> tuple[TensorList, TensorList]:
    low, high = zip(*(single.positions(tensor) for tensor in like.tensors), strict=True)
    return TensorList(low), TensorList(high)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    def total(term: Term) -> Scalar:
        x, axes = term
        if isinstance(x, PerTensor):  # already one number for each tensor
            return x * x if isinstance(term, Squares) else x
        if axes is not None:
            wrap = Squares if isinstance(term, Squares) else lambda *pair: pair
            return _apply(lambda tensor: single.sums(wrap(tensor, axes))[0], x)
        if isinstance(term, Squares):
            return PerTensor(squares_of_each(x.tensors))
        return PerTensor(torch.stack([plain(tensor, None) for tensor in x.tensors]))

    return tuple(map(total, terms))


def means(*terms: Term) -> tuple[Scalar, ...]:
    def divided(total: Any, x: Any, axes: Axes) -> Any:
        counts = [float(count(tensor.shape, axes)) for tensor in x.tensors]
        if isinstance(total, PerTensor):  # without a copy from the host, which a CUDA graph could not hold
            return PerTensor(torch.stack(torch._foreach_div(total.values.unbind(), counts)))
        return TensorList(torch._foreach_div(total.tensors, counts))

    return tuple(divided(total, *term) for total, term in zip(sums(*terms), terms, strict=True))


def amax(x: TensorList, axes: Axes) -> Scalar:
    if axes is None:
        return PerTensor(torch.stack([single.amax(tensor, None) for tensor in x.tensors]))
    return _apply(lambda tensor: single.amax(tensor, axes), x)


def largest_magnitude(x: TensorList, axes: Axes) -> Scalar:
    return amax(abs(x), axes)


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    """One side if the host knows that all tensors take it; else both sides, selected tensor by tensor."""
    if isinstance(condition, bool):
        return yes() if condition else no()
    answers = [condition.values] if isinstance(condition, PerTensor) else condition.tensors
    if all(answer.device.type == "cpu" for answer in answers):
        truths = {truth for answer in answers for truth in answer.reshape(-1).tolist()}
        if len(truths) == 1:
            return yes() if truths.pop() else no()
    chosen: R = single.select(where, condition, yes(), no())
    return chosen


def cut(x: Any, axis: int, sizes: Shape) -> Sequence[Any]:
    return [TensorList(list(pieces)) for pieces in zip(*(single.cut(t, axis, sizes) for t in x.tensors), strict=True)]


def join(parts: Sequence[Any], axis: int) -> Any:
    return _apply(lambda *tensors: single.join(tensors, axis), *parts)


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands, precision: _apply(functools.partial(function, precision=precision), *operands)


IN_PRECISION = in_precisions(globals(), {name: lifted(getattr(single, name)) for name in PRODUCTS})
