"""The numpy space: the reference every other engine is held against.

Sums accumulate in float64 whatever the arrays hold.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    count,
    derived,
    elementwise,
    shape_along,
)
from thalweg.dtypes import DTYPES
from thalweg.errors import OptionError

Arr: TypeAlias = npt.NDArray[Any]
R = TypeVar("R")


def named_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype of that name; bfloat16 comes from ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError:
        raise OptionError("bfloat16 needs a package that is not installed: pip install ml_dtypes") from None
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def shape(x: Arr) -> Shape:
    return x.shape


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """The name of a dtype, which numpy takes microseconds to make."""
    return dtype.name


def dtype(x: Arr) -> str:
    return name_of(x.dtype)


def astype(x: Arr, dtype: str) -> Arr:
    return np.asarray(x, named_dtype(dtype))  # an array, too, of the scalars that 0-d arithmetic gives


def full(shape: Shape, value: float, like: Arr) -> Arr:
    return np.full(shape, value, like.dtype)


def zeros_like(x: Arr) -> Arr:
    return np.zeros(x.shape, x.dtype)


def identity(size: int, like: Arr) -> Arr:
    return np.eye(size, dtype=like.dtype)


def positions(like: Arr) -> tuple[Arr, Arr]:
    index = np.arange(like.size, dtype=np.uint64).reshape(like.shape)
    return index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)


abs, sqrt, exp, log, expm1, cos, floor, isfinite, maximum, minimum = elementwise(functools.partial(getattr, np))

_always, _unless_better = derived(sys.modules[__name__], np.where)
where, reshape, folded, reshape_like, matmul_rounded, divided, mean_power = _always
word, zeros_reduced, matrix_norm, add_identity, _, largest_magnitude, combined = _unless_better


def spacing(x: Arr, digits: int, lowest: int) -> Arr:
    distance: Arr = np.ldexp(np.ones((), x.dtype), np.maximum(np.frexp(x)[1], lowest) - digits)
    return distance


def bits(x: Arr) -> Arr:
    return x.view(np.int32)


def from_bits(x: Arr) -> Arr:
    return x.view(np.float32)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(rounded_as(total(term), term) for term in terms)


def means(*terms: Term) -> tuple[Scalar, ...]:
    return tuple(rounded_as(total(term) / count(term[0].shape, term[1]), term) for term in terms)


def total(term: Term) -> Scalar:
    """The sum of a term in float64; over all axes a Python number, which keeps its digits and widens nothing."""
    x, axes = term
    values = x * x if isinstance(term, Squares) else x
    if axes is not None:
        return values.sum(axis=axes, keepdims=True, dtype=np.float64)
    whole = float(values.sum(dtype=np.float64))
    if whole == 0 and isinstance(term, Squares):  # or did all squares underflow?
        whole = float(np.square(x, dtype=np.float64).sum())
    return whole


def rounded_as(reduced: Scalar, term: Term) -> Scalar:
    return reduced if term[1] is None else reduced.astype(term[0].dtype)


def amax(x: Arr, axes: Axes) -> Scalar:
    return x.max(axis=axes, keepdims=axes is not None, initial=-math.inf)


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    return yes() if condition else no()


def peaks(x: Arr, axis: int, size: int) -> Arr:
    largest: Arr = np.abs(folded(x, axis, size)).max(axis=-1)
    return largest


swapaxes: Callable[..., Arr] = np.swapaxes
upper: Callable[..., Arr] = np.triu
join: Callable[..., Arr] = np.concatenate


def cut(x: Arr, axis: int, sizes: Shape) -> list[Arr]:
    return np.split(x, list(itertools.accumulate(sizes[:-1])), axis)


def matmul(x: Arr, y: Arr) -> Arr:
    product: Arr = x @ y
    return product


def matmul_add(x: Arr, y: Arr, z: Arr, product: float, plus: float) -> Arr:
    added: Arr = product * (x @ y) + plus * z
    return added


matmul_symmetric, matmul_add_symmetric = matmul, matmul_add


def in_precision(precision: str) -> Any:
    """The space itself: CPUs have no TF32."""
    return sys.modules[__name__]


def rounded(x: Arr, dtype: str) -> Arr:
    """x rounded, in its dtype: numpy's products of narrow numbers are slow, and bfloat16 is a package of its own."""
    if dtype == "float32":
        return x.astype(np.float32).astype(x.dtype) if x.dtype == np.float64 else x
    distance = spacing(x, DTYPES[dtype].digits, DTYPES[dtype].least)
    nearest: Arr = np.rint(x / distance) * distance
    return nearest


def solve(matrix: Arr, right: Arr) -> Arr:
    try:
        return np.linalg.solve(matrix, right)
    except np.linalg.LinAlgError:  # singular: the caller's finiteness guard sees the NaN
        return np.full(right.shape, math.nan, right.dtype)


def eigenvectors(x: Arr) -> Arr:
    return np.linalg.eigh(x).eigenvectors[..., ::-1]


def orthonormal(x: Arr) -> Arr:
    return np.linalg.qr(x).Q


def arrange(x: Arr, by: Arr, axis: int) -> Arr:
    order = np.argsort(-by, axis=-1, kind="stable")
    return np.take_along_axis(x, order.reshape(shape_along(x.shape, axis)), axis)


def largest_column(x: Arr) -> Arr:
    scaled = x / np.maximum(largest_magnitude(x, (-2, -1)), np.finfo(x.dtype).tiny)
    index = (scaled * scaled).sum(axis=-2, keepdims=True, dtype=np.float64).argmax(axis=-1, keepdims=True)
    return np.take_along_axis(x, index, axis=-1)
