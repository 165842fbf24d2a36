"""What is done to each matrix of a stack beside its products, where the library's kernels fall short of the memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.spaces import torch as single

#: Elements that one program goes through; rows that it multiplies, and columns at a time.
BLOCK, ROWS, COLUMNS = 4096, 8, 256
#: Rows at a time of columns that one program sums.
TALL, NARROW = 64, 32


@triton.jit
def divide_kernel(x, by, out, size, BLOCK: tl.constexpr):
    matrix, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, first = at < size, matrix * size
    value = tl.load(x + first + at, inside).to(tl.float32)
    value = tl.div_rn(value, tl.load(by + matrix).to(tl.float32))
    tl.store(out + first + at, value.to(out.dtype.element_ty), inside)


def divided(x: Tensor, by: Tensor, dtype: str | None) -> Tensor:
    """x / by for a stack (k, m, n) and one number for each matrix: torch's kernel for it is 2.5 times slower."""
    out_dtype = x.dtype if dtype is None else getattr(torch, dtype)
    x, out = x.contiguous(), torch.empty(x.shape, dtype=out_dtype, device=x.device)
    size = out[0].numel() if len(out) else 0
    if size:
        divide_kernel[triton.cdiv(size, BLOCK), len(x)](x, by.contiguous(), out, size, BLOCK=BLOCK)
    return out


@triton.jit
def combine_kernel(out, a, x, b, y, c, z, size, TERMS: tl.constexpr, BLOCK: tl.constexpr):
    matrix, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, at = at < size, matrix * size + at
    total = tl.load(a + matrix) * tl.load(x + at, inside)
    if TERMS > 1:
        total += tl.load(b + matrix) * tl.load(y + at, inside)
    if TERMS > 2:
        total += tl.load(c + matrix) * tl.load(z + at, inside)
    tl.store(out + at, total, inside)


def combined(*terms: tuple[Any, Tensor]) -> Tensor:
    """The sum of up to three stacks in float32, each multiplied by a number, or by one for each of its matrices."""
    stacks, first = [x.contiguous() for _, x in terms], terms[0][1]
    numbers = [
        (number if isinstance(number, Tensor) else first.new_full((1,), number)).reshape(-1).expand(len(first))
        for number, _ in terms
    ]
    out, size = torch.empty_like(stacks[0]), first[0].numel() if len(first) else 0
    pairs = [pointer for pair in zip(map(Tensor.contiguous, numbers), stacks, strict=True) for pointer in pair]
    if size:
        grid = triton.cdiv(size, BLOCK), len(first)
        combine_kernel[grid](out, *pairs, *[out] * (6 - len(pairs)), size, TERMS=len(terms), BLOCK=BLOCK)
    return out


@triton.jit
def power_kernel(x, by, out, size, POWER: tl.constexpr, BLOCK: tl.constexpr):
    matrix, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.abs(tl.load(x + matrix * size + at, at < size, 0.0))
    if POWER == 4:
        value = tl.div_rn(value, tl.load(by + matrix))
        value *= value
        value *= value
    tl.store(out + matrix * tl.num_programs(0) + tl.program_id(0), tl.sum(value))


def mean_power(x: Tensor, power: int, unit: Any, axes: tuple[int, ...]) -> Tensor:
    """The mean of ``abs(x / unit) ** power`` of each slice of a stack in float32. axes: all but the first."""
    count, size, x = len(x), x[0].numel() if len(x) else 0, x.contiguous()
    by = unit.contiguous() if isinstance(unit, Tensor) else x.new_full((1,), unit).expand(count)
    sums = x.new_empty(count, max(1, triton.cdiv(size, BLOCK)))
    if size:
        power_kernel[sums.shape[1], count](x, by, sums, size, POWER=power, BLOCK=BLOCK)
    means = sums.sum(1) / size if size else sums.new_zeros(count)
    return means.reshape(count, *[1] * (x.ndim - 1))


@triton.jit
def column_kernel(x, out, rows, columns, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float64)
    for i in range(STEPS):
        row = i * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (column < columns)
        value = tl.load(x + matrix * rows * columns + row.to(tl.int64) * columns + column, inside, 0.0).to(tl.float64)
        total += value * value
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tl.store(out + matrix * columns + column, tl.sum(total, 0), column < columns)


def largest_column(x: Tensor) -> Tensor:
    """The column of largest norm of each matrix of a stack; torch would first make a copy in float64."""
    if x.ndim != 3 or x.dtype != torch.float32 or not x.numel():
        return single.largest_column(x)
    x, (count, rows, columns) = x.contiguous(), x.shape
    squares = torch.empty(count, 1, columns, dtype=torch.float64, device=x.device)
    sizes = dict(STEPS=triton.cdiv(rows, TALL), ROWS=TALL, COLUMNS=NARROW)
    column_kernel[triton.cdiv(columns, NARROW), count](x, squares, rows, columns, **sizes)
    return single.take_largest(x, squares)


@triton.jit
def vector_kernel(x, vector, out, rows, columns, STEPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    matrix, row = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    total, first = tl.zeros((ROWS, COLUMNS), tl.float32), matrix * rows * columns
    for i in range(STEPS):
        column = i * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        value = tl.load(x + first + row.to(tl.int64) * columns + column, inside, 0.0)
        total += value * tl.load(vector + matrix * columns + column, column < columns, 0.0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + matrix * rows + row, tl.sum(total, 1), row < rows)


def times_vector(x: Tensor, vector: Tensor) -> Tensor:
    """x @ vector for a stack (k, m, n) and (k, n, 1) in float32, which torch's kernels read several times."""
    x, (count, rows, columns) = x.contiguous(), x.shape
    out = torch.empty(count, rows, 1, device=x.device)
    sizes = dict(STEPS=triton.cdiv(columns, COLUMNS), ROWS=ROWS, COLUMNS=COLUMNS)
    vector_kernel[triton.cdiv(rows, ROWS), count](x, vector.contiguous(), out, rows, columns, **sizes)
    return out
