"""What the kernels of Kron read of a matrix: its figures, sums that others have left, whether there is work at all."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.kron_layout import DUE, GO

#: Integers that change from call to call: a kernel compiled for one serves all.
VARYING = [
    *("count", "first", "rows", "columns", "size", "programs", "pitch", "tiles", "slices", "n", "depth", "parts"),
    *("length", "a", "b", "e", "out", "source", "turned", "straight", "scales", "partials", "sums", "squares"),
    *("largest", "h_panel", "a_pitch", "b_pitch", "turned_pitch", "sums_pitch", "columns_pitch", "side", "best"),
    *("best_column", "vector", "vector_squares", "image_squares", "image_count", "error", "stepped", "product"),
    *("skew", "first_sums", "first_count", "second", "second_count", "left", "left_largest", "row_scales"),
    *("column_scales", "row_sums", "row_largest", "row_count", "row_pitch", "column_sums", "column_largest"),
    *("column_count", "column_pitch", "axis", "refreshes", "as_it_lies", "operands", "state", "turns"),
]


@triton.jit
def figure(figures, which, matrix, count):
    return tl.load(figures + which * count + matrix)


@triton.jit
def number(places, which: tl.constexpr, matrix, count):
    """A number that stands in the table of addresses itself."""
    return tl.load(places + which * count + matrix)


@triton.jit
def sum_of(numbers, count, BLOCK: tl.constexpr):
    """The sum of a panel of numbers, in an order that is always the same."""
    total = tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < count:
        index = begin + tl.arange(0, BLOCK)
        total += tl.load(numbers + index, index < count, other=0.0)
        begin += BLOCK
    return tl.sum(total)


@triton.jit
def largest_of(numbers, count, BLOCK: tl.constexpr):
    found = tl.zeros((BLOCK,), tl.float32)
    begin = 0
    while begin < count:
        index = begin + tl.arange(0, BLOCK)
        found = tl.maximum(found, tl.load(numbers + index, index < count, other=0.0))
        begin += BLOCK
    return tl.max(found)


@triton.jit
def idle(figures, matrix, count, refreshes):
    """Whether there is nothing to do for a matrix: it is not stepped, or has no refresh where this is part of one."""
    rests = figure(figures, GO, matrix, count) == 0
    return rests | ((figure(figures, DUE, matrix, count) == 0) & (refreshes != 0))
