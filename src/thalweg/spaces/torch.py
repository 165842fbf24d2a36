"""The torch space: plain tensors on any device, eager or inside ``torch.compile``."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch

from thalweg.arrays import (
    Axes,
    Scalar,
    Shape,
    Squares,
    Term,
    Truth,
    derived,
    elementwise,
    is_number,
    reduced_shape,
    shape_along,
)
from thalweg.spaces.torch_sums import plain, squares

Arr: TypeAlias = torch.Tensor
R = TypeVar("R")


def shape(x: Arr) -> Shape:
    return tuple(x.shape)


def dtype(x: Arr) -> str:
    return str(x.dtype).removeprefix("torch.")


def astype(x: Arr, dtype: str) -> Arr:
    return x.to(getattr(torch, dtype))


def full(shape: Shape, value: float, like: Arr) -> Arr:
    return torch.full(shape, value, dtype=like.dtype, device=like.device)


def zeros_like(x: Arr) -> Arr:
    return torch.zeros_like(x)


def identity(size: int, like: Arr) -> Arr:
    return torch.eye(size, dtype=like.dtype, device=like.device)


def positions(like: Arr) -> tuple[Arr, Arr]:
    index = torch.arange(like.numel(), device=like.device).reshape(like.shape)
    return index & 0xFFFFFFFF, index >> 32


abs, sqrt, exp, log, expm1, cos, floor, isfinite, _, _ = elementwise(functools.partial(getattr, torch))


def maximum(x: Scalar, y: Scalar) -> Scalar:
    if is_number(y):
        return max(x, y) if is_number(x) else torch.clamp(x, min=y)
    return torch.clamp(y, min=x) if is_number(x) else torch.maximum(x, y)


def minimum(x: Scalar, y: Scalar) -> Scalar:
    if is_number(y):
        return min(x, y) if is_number(x) else torch.clamp(x, max=y)
    return torch.clamp(y, max=x) if is_number(x) else torch.minimum(x, y)


_always, _unless_better = derived(sys.modules[__name__], torch.where)
where, reshape, folded, reshape_like, matmul_rounded, divided = _always
word, zeros_reduced, _, _, means = _unless_better


def spacing(x: Arr, digits: int, lowest: int) -> Arr:
    return torch.ldexp(torch.ones_like(x), torch.clamp(torch.frexp(x)[1], min=lowest) - digits)


def bits(x: Arr) -> Arr:
    return x.view(torch.int32)


def from_bits(x: Arr) -> Arr:
    return x.view(torch.float32)


def sums(*terms: Term) -> tuple[Scalar, ...]:
    def summed(term: Term) -> Scalar:
        x, axes = term
        if axes == ():  # which torch takes for all of them
            return x * x if isinstance(term, Squares) else x
        return squares(x, axes) if isinstance(term, Squares) else plain(x, axes)

    return tuple(map(summed, terms))


def amax(x: Arr, axes: Axes) -> Scalar:
    if x.numel() == 0:  # torch refuses to take the largest of nothing
        kept = () if axes is None else reduced_shape(shape(x), axes)
        return full(kept, -math.inf, x)
    return x.amax() if axes is None else x.amax(dim=axes, keepdim=True)


def cond(condition: Truth, yes: Callable[[], R], no: Callable[[], R]) -> R:
    """Take one side where the answer lies on the host; else compute both and select.

    Asking a GPU, or a program being compiled, for the answer would be a wait or a graph break.
    """
    if isinstance(condition, bool):
        return yes() if condition else no()
    if condition.device.type == "cpu" and not torch.compiler.is_compiling():
        return yes() if bool(condition) else no()
    chosen: R = select(torch.where, condition, yes(), no())
    return chosen


def select(where: Callable[..., Any], condition: Any, yes: Any, no: Any) -> Any:
    """``where`` through nested tuples and lists of tensors."""
    if isinstance(yes, (tuple, list)):
        return type(yes)(select(where, condition, a, b) for a, b in zip(yes, no, strict=True))
    return where(condition, yes, no)


def peaks(x: Arr, axis: int, size: int) -> Arr:
    groups: Arr = folded(x, axis, size).abs()
    return groups.amax(dim=-1) if groups.numel() else groups.sum(dim=-1)


swapaxes: Callable[..., Arr] = torch.transpose
upper: Callable[..., Arr] = torch.triu


def cut(x: Arr, axis: int, sizes: Shape) -> Sequence[Arr]:
    return x.tensor_split(tuple(itertools.accumulate(sizes[:-1])), axis)


def join(parts: Sequence[Arr], axis: int) -> Arr:
    return torch.cat(list(parts), axis)


def matmul(x: Arr, y: Arr) -> Arr:
    if is_slow(x):
        return (x.float() @ y.float()).to(x.dtype)
    return x @ y


def matmul_add(x: Arr, y: Arr, z: Arr, product: float, plus: float) -> Arr:
    if is_slow(x):
        return matmul_add(x.float(), y.float(), z.float(), product, plus).to(x.dtype)
    if x.ndim == 3:
        return torch.baddbmm(z, x, y, beta=plus, alpha=product)
    return product * (x @ y) + plus * z


matmul_symmetric, matmul_add_symmetric = matmul, matmul_add


def add_identity(x: Arr, a: float) -> Arr:
    total = x.clone()
    total.diagonal(dim1=-2, dim2=-1).add_(a)
    return total


def is_slow(x: Arr) -> bool:
    """Whether products of such tensors are to be made in float32, and then rounded, which gives the same numbers.

    Most CPUs multiply no numbers of 16 bits. There torch takes hundreds of times as long for them.
    """
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16)


def rounded(x: Arr, dtype: str) -> Arr:
    return astype(x, dtype)


def matrix_norm(x: Arr) -> Arr:
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return squares(x, (-2, -1), wide).sqrt()


def solve(matrix: Arr, right: Arr) -> Arr:
    solution: Arr = torch.linalg.solve_triangular(matrix, right, upper=False)
    return solution


def eigenvectors(x: Arr) -> Arr:
    try:
        columns: Arr = torch.linalg.eigh(x)[1]
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # float32 may not converge where most of a matrix is 0, as in an embedding of which few rows are used
        columns = torch.linalg.eigh(x.double())[1].to(x.dtype)
    return columns.flip(-1).contiguous()


def orthonormal(x: Arr) -> Arr:
    columns: Arr = torch.linalg.qr(x)[0]
    return columns.contiguous()


def arrange(x: Arr, by: Arr, axis: int) -> Arr:
    order = torch.argsort(by, dim=-1, descending=True, stable=True)
    return torch.take_along_dim(x, order.reshape(shape_along(shape(x), axis)), axis)


def largest_column(x: Arr) -> Arr:
    index = (x * x).sum(dim=-2, keepdim=True).argmax(dim=-1, keepdim=True)
    return torch.take_along_dim(x, index, dim=-1)
