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
    in_precisions,
    is_number,
    reduced_shape,
    shape_along,
)
from thalweg.spaces import torch_products as products
from thalweg.spaces.torch_sums import accumulated_in, norm, plain, squares

Arr: TypeAlias = torch.Tensor
#: Columns of a matrix below which QR takes GPUs no longer than products.
LEAST_FOR_BLOCKS = 64
#: Sizes of matrices of which libraries for GPUs make products up to a hundred times as slowly as sums.
FEW = 8
#: Rows of a half of a symmetric product that is cut in two on a CPU, where no library makes half of it.
LEAST_HALF = 256
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
where, reshape, folded, reshape_like, matmul_rounded, divided, mean_power = _always
word, zeros_reduced, _, _, means, _, _ = _unless_better


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
        reduced = () if axes is None else reduced_shape(shape(x), axes)
        return full(reduced, -math.inf, x)
    return x.amax() if axes is None else x.amax(dim=axes, keepdim=True)


def largest_magnitude(x: Arr, axes: Axes) -> Scalar:
    if x.is_cuda and x.numel() and axes is not None:
        return torch.linalg.vector_norm(x, math.inf, dim=axes, keepdim=True)
    return amax(torch.abs(x), axes)


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


def matmul(x: Arr, y: Arr, precision: str | None = None) -> Arr:
    if is_slow(x):
        return (x.float() @ y.float()).to(x.dtype)
    if x.is_cuda and are_few(x, y):
        return few_products(x, y)
    with products.in_precision(precision, x):
        return x @ y


def matmul_add(x: Arr, y: Arr, z: Arr, product: float, plus: float, precision: str | None = None) -> Arr:
    if is_slow(x):
        return matmul_add(x.float(), y.float(), z.float(), product, plus).to(x.dtype)
    with products.in_precision(precision, x):
        if x.ndim == 3 and is_number(product) and is_number(plus) and not (x.is_cuda and are_few(x, y)):
            return torch.baddbmm(z, x, y, beta=plus, alpha=product)
        return product * matmul(x, y, precision) + plus * z


def are_few(x: Arr, y: Arr) -> bool:
    """Whether these are products for which libraries for GPUs have no fast code: with two of three sizes small."""
    sizes = sorted((x.shape[-2], x.shape[-1], y.shape[-1]))
    return y.shape[-1] == 1 or (x.ndim == 3 and x.dtype == torch.float32 and sizes[1] <= FEW)


def few_products(x: Arr, y: Arr) -> Arr:
    """x @ y by sums over the axis that they share."""
    if y.shape[-1] == 1:
        return (x * y.mT).sum(-1, keepdim=True)
    if x.shape[-1] > FEW:
        return (x.unsqueeze(-2) * y.mT.unsqueeze(-3)).sum(-1)
    return (x.unsqueeze(-1) * y.unsqueeze(-3)).sum(-2)


def matmul_symmetric(x: Arr, y: Arr, precision: str | None = None) -> Arr:
    if not is_cut(x):
        return matmul(x, y, precision)
    return by_halves(x, y, None, lambda x, y, _: matmul(x, y, precision))


def matmul_add_symmetric(x: Arr, y: Arr, z: Arr, product: float, plus: float, precision: str | None = None) -> Arr:
    if not is_cut(x):
        return matmul_add(x, y, z, product, plus, precision)
    return by_halves(x, y, z, lambda x, y, z: matmul_add(x, y, z, product, plus, precision))


def is_cut(x: Arr) -> bool:
    """Whether a symmetric product of this is made by halves."""
    is_large = x.ndim == 3 and x.shape[-2] >= 2 * LEAST_HALF
    return is_large and x.is_cpu and not is_slow(x) and not torch.compiler.is_compiling()


def by_halves(x: Arr, y: Arr, z: Arr | None, multiply: Callable[[Arr, Arr, Any], Arr]) -> Arr:
    """What ``multiply`` makes of all three, known to be symmetric as z is: what is above the diagonal is copied."""
    size = x.shape[-2]
    if size < 2 * LEAST_HALF:
        return multiply(x, y, z)
    first, last, whole = slice(size // 2), slice(size // 2, None), x.new_empty(len(x), size, size)
    for part in (first, last):
        added = None if z is None else z[:, part, part]
        whole[:, part, part] = by_halves(x[:, part], y[:, :, part], added, multiply)
    below = multiply(x[:, last], y[:, :, first], None if z is None else z[:, last, first])
    whole[:, last, first], whole[:, first, last] = below, by_rows(below.mT)
    return whole


def in_precision(precision: str) -> Any:
    return IN_PRECISION[precision]


def combined(*terms: tuple[Scalar, Arr]) -> Arr:
    (number, x), *others = terms
    total: Arr = x if is_number(number) and number == 1 else number * x
    for number, x in others:  # without an array for each product
        total = torch.add(total, x, alpha=number) if is_number(number) else torch.addcmul(total, x, number)
    return total


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
    return norm(x, (-2, -1), wide) if accumulated_in(wide, x.device) == wide else squares(x, (-2, -1), wide).sqrt()


def solve(matrix: Arr, right: Arr) -> Arr:
    solution: Arr = torch.linalg.solve_triangular(matrix, right, upper=False)
    return solution


def eigenvectors(x: Arr) -> Arr:
    """In float64 where float32 does not converge, or where LAPACK leaves NaN without a word: most of the matrix is 0,
    as in an embedding of which few rows are used, or its rows are nearly one another's multiples."""
    try:
        columns: Arr = torch.linalg.eigh(x)[1]
        if x.is_meta or torch.compiler.is_compiling() or bool(columns.isfinite().all()):
            return columns.flip(-1).contiguous()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        pass
    is_finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    columns = torch.linalg.eigh(torch.where(is_finite, x, 0.0).double())[1].to(x.dtype)
    return torch.where(is_finite, columns, math.nan).flip(-1).contiguous()


def product_in_float32(x: Arr, y: Arr) -> Arr:
    return matmul(x, y, "float32")


def orthonormal(x: Arr, product: Callable[[Arr, Arr], Arr] = product_in_float32) -> Arr:
    """Columns as QR makes them; on GPUs by products, where the host may wait to hear whether these serve."""
    if not x.is_cuda or x.shape[-1] < LEAST_FOR_BLOCKS or torch.compiler.is_compiling() or is_capturing(x):
        return by_qr(x)
    return by_blocks(x, product=product)


def by_blocks(x: Arr, side: int = 256, product: Callable[[Arr, Arr], Arr] = product_in_float32) -> Arr:
    """Block after block of so many columns is freed of those before it, and divided by the Cholesky factor of its
    products, twice. Where columns of a block are so nearly parallel that products lose their digits, QR.
    """
    columns, is_good = torch.empty_like(x), torch.ones(len(x), dtype=torch.bool, device=x.device)
    least, most = 8 * math.sqrt(torch.finfo(x.dtype).eps), 0.125
    for first in range(0, x.shape[2], side):
        before, block = columns[:, :, :first], x[:, :, first : first + side]
        for is_last in (False, True):
            if first:
                block = block - product(before, product(before.mT, block))
            block, diagonal = divide_by_cholesky(block, product)
            is_good &= ((diagonal - 1).abs().amax(1) < most) if is_last else (diagonal.amin(1) > least)
        columns[:, :, first : first + side] = block
    if not bool(is_good.all()):
        columns[~is_good] = by_qr(x[~is_good])
    return columns


def divide_by_cholesky(x: Arr, product: Callable[[Arr, Arr], Arr]) -> tuple[Arr, Arr]:
    """x R^-1 with R^T R = x^T x for x with columns of length 1, and the diagonal of R; 0 where there is none."""
    lengths = torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    x = x / torch.where(lengths > 0, lengths, 1.0)
    factor, failed = torch.linalg.cholesky_ex(product(x.mT, x))
    diagonal = torch.where((failed == 0).unsqueeze(-1), factor.diagonal(dim1=-2, dim2=-1), 0.0)
    return product(x, inverted(factor.mT)), diagonal


def inverted(x: Arr, side: int = 64) -> Arr:
    """The inverse of upper triangular matrices: by products, for which libraries have faster code than for solving."""
    n = x.shape[-1]
    if n <= side:
        solution: Arr = torch.linalg.solve_triangular(x, identity(n, x).expand_as(x), upper=True)
        return solution
    half, inverse = n // 2, torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    first, last = x[:, :half, :half], x[:, half:, half:]
    if 2 * half == n:
        first, last = inverted(torch.cat([first, last]), side).chunk(2)
    else:
        first, last = inverted(first, side), inverted(last, side)
    inverse[:, :half, :half], inverse[:, half:, half:] = first, last
    inverse[:, :half, half:] = -matmul(first, matmul(x[:, :half, half:], last, "float32"), "float32")
    return inverse


def by_qr(x: Arr) -> Arr:
    return by_rows(torch.linalg.qr(x)[0])


def by_rows(x: Arr) -> Arr:
    """Matrices with rows as lines in memory; on CPUs one by one, since torch turns single ones twice as fast."""
    if not x.is_cpu or x.is_contiguous() or torch.compiler.is_compiling():
        return x.contiguous()
    rows = torch.empty_like(x, memory_format=torch.contiguous_format)
    for target, matrix in zip(rows, x, strict=True):
        target.copy_(matrix)
    return rows


def is_capturing(x: Arr) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def arrange(x: Arr, by: Arr, axis: int) -> Arr:
    order = torch.argsort(by, dim=-1, descending=True, stable=True)
    return x.gather(axis, order.reshape(shape_along(shape(x), axis)).expand_as(x))


def largest_column(x: Arr) -> Arr:
    if x.is_cuda:
        return take_largest(x, torch.linalg.vector_norm(x, dim=-2, keepdim=True, dtype=torch.float64))
    scaled = x / largest_magnitude(x, (-2, -1)).clamp(min=torch.finfo(x.dtype).tiny)
    return take_largest(x, (scaled * scaled).sum(dim=-2, keepdim=True))


def take_largest(x: Arr, squares: Arr) -> Arr:
    """The column of the largest number, of one for each column."""
    index = squares.argmax(dim=-1, keepdim=True)
    return x.gather(-1, index.expand(*x.shape[:-1], 1))


IN_PRECISION = in_precisions(globals(), globals())
