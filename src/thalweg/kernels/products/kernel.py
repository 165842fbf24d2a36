"""The kernel of products: alpha a b + beta plus, for stacks of matrices that the GPU fetches tile by tile by itself.

Programs take tiles in turns. A tile has ``SIDE`` rows and as many columns or twice as many; it is written in squares of
``SIDE``. Of a symmetric product only tiles on and below the diagonal are computed, and squares below it are written a
second time, mirrored.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from thalweg.kernels.triton.numbers import as_stored

#: Whether Triton interprets kernels: then none of their numbers can be the bound of a range.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: Rows of tiles that are computed next to each other, so that they share what they read.
BAND = tl.constexpr(8)


@triton.jit
def triangle_row(index):
    """The row of an element of a lower triangle, counted row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)  # a square root may be off by a rounding
    return tl.where(row * (row + 1) // 2 > index, row - 1, row)


@triton.jit
def count_tiles(rows, columns, SIDE: tl.constexpr, HALVES: tl.constexpr, SYMMETRIC: tl.constexpr):
    """How many tiles each matrix of a product has."""
    high = tl.cdiv(rows, SIDE)
    if SYMMETRIC:
        whole = high // HALVES
        return HALVES * (whole * (whole + 1) // 2) + high % HALVES * (whole + 1)
    else:
        return high * tl.cdiv(columns, SIDE * HALVES)


@triton.jit
def place_tile(tile, rows, columns, SIDE: tl.constexpr, HALVES: tl.constexpr, SYMMETRIC: tl.constexpr):
    """The first row and column of a tile."""
    high = tl.cdiv(rows, SIDE)
    if SYMMETRIC:
        band = triangle_row(tile // HALVES)
        first, wide = band * HALVES, band + 1
        inside = tile - HALVES * (band * wide // 2)
        height = tl.minimum(high - first, HALVES)
    else:
        wide = tl.cdiv(columns, SIDE * HALVES)
        first = tile // (BAND * wide) * BAND
        inside = tile % (BAND * wide)
        height = tl.minimum(high - first, BAND)
    return (first + inside % height) * SIDE, inside // height * (SIDE * HALVES)


@triton.jit
def fetch(stack, matrix, top, left, TURNED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """A tile of a stack. TURNED: columns lie in memory as rows."""
    if TURNED:
        return tl.trans(tl.reshape(stack.load([matrix, left, top]), (WIDE, HIGH)))
    else:
        return tl.reshape(stack.load([matrix, top, left]), (HIGH, WIDE))


@triton.jit
def multiply_tile(
    a,
    b,
    matrix,
    top,
    left,
    depth,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    SIDE: tl.constexpr,
    HALVES: tl.constexpr,
    BK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """A tile of a product, in float32. DIGITS: of float32, "tf32", or "tf32x3": three products for all digits."""
    BN: tl.constexpr = SIDE * HALVES
    total = tl.zeros((SIDE, BN), tl.float32)
    if INTERPRETED:
        at = depth * 0
        while at < depth:
            x = fetch(a, matrix, top, at, A_TURNED, SIDE, BK).to(tl.float32)
            total = tl.dot(x, fetch(b, matrix, at, left, B_TURNED, BK, BN).to(tl.float32), total)
            at += BK
    else:
        for at in tl.range(0, depth, BK):
            x = fetch(a, matrix, top, at, A_TURNED, SIDE, BK)
            total = tl.dot(x, fetch(b, matrix, at, left, B_TURNED, BK, BN), total, input_precision=DIGITS)
    return total


@triton.jit
def store_square(
    x,
    plus,
    out,
    matrix,
    top,
    left,
    alpha,
    beta,
    ADDS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Finish a square of the product and write it; below the diagonal of a symmetric one also its mirror image."""
    x = x * alpha
    if ADDS:
        x += beta * fetch(plus, matrix, top, left, False, SIDE, SIDE).to(tl.float32)
    rounded = as_stored(x, 0.0, out.dtype, False)
    out.store([matrix, top, left], tl.reshape(rounded, (1, SIDE, SIDE)))
    if SYMMETRIC:
        if left < top:
            out.store([matrix, left, top], tl.reshape(tl.trans(rounded), (1, SIDE, SIDE)))


@triton.jit
def make_tile(
    index,
    tiles,
    a,
    b,
    plus,
    out,
    rows,
    columns,
    depth,
    alpha,
    beta,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    ADDS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SIDE: tl.constexpr,
    HALVES: tl.constexpr,
    BK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Compute one of the tiles of a stack's products and write it, square by square."""
    matrix = index // tiles
    top, left = place_tile(index % tiles, rows, columns, SIDE, HALVES, SYMMETRIC)
    x = multiply_tile(a, b, matrix, top, left, depth, A_TURNED, B_TURNED, SIDE, HALVES, BK, DIGITS)
    if HALVES == 1:
        store_square(x, plus, out, matrix, top, left, alpha, beta, ADDS, SYMMETRIC, SIDE)
    else:
        first, second = tl.split(tl.permute(tl.reshape(x, (SIDE, 2, SIDE)), (0, 2, 1)))
        store_square(first, plus, out, matrix, top, left, alpha, beta, ADDS, SYMMETRIC, SIDE)
        left += SIDE
        if SYMMETRIC:
            is_wanted = left <= top
        else:
            is_wanted = left < columns
        if is_wanted:
            store_square(second, plus, out, matrix, top, left, alpha, beta, ADDS, SYMMETRIC, SIDE)


@triton.jit
def turn_kernel(x, out, rows, columns, stack_step, column_step, SIDE: tl.constexpr):
    """Write matrices whose columns lie in memory as rows, row by row."""
    wide = tl.cdiv(columns, SIDE)
    row = tl.program_id(0) // wide * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(0) % wide * SIDE + tl.arange(0, SIDE)
    matrix = tl.program_id(1).to(tl.int64)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    at = matrix * stack_step + column.to(tl.int64)[:, None] * column_step + row[None, :]
    tile = tl.trans(tl.load(x + at, inside))
    at = matrix * rows * columns + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out + at, tile, tl.trans(inside))


@triton.jit(do_not_specialize=["count"])
def product_kernel(
    a,
    b,
    plus,
    out,
    count,
    rows,
    columns,
    depth,
    alpha,
    beta,
    A_TURNED: tl.constexpr,
    B_TURNED: tl.constexpr,
    ADDS: tl.constexpr,
    SYMMETRIC: tl.constexpr,
    SIDE: tl.constexpr,
    HALVES: tl.constexpr,
    BK: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """alpha a b + beta plus for each matrix. Stacks are described; TURNED: columns of an operand lie as rows."""
    tiles = count_tiles(rows, columns, SIDE, HALVES, SYMMETRIC)
    tl.assume(depth > 0)
    # fmt: off
    if INTERPRETED:
        index = tl.program_id(0)
        while index < count * tiles:
            make_tile(
                index, tiles, a, b, plus, out, rows, columns, depth, alpha, beta,
                A_TURNED, B_TURNED, ADDS, SYMMETRIC, SIDE, HALVES, BK, DIGITS,
            )
            index += tl.num_programs(0)
    else:
        for index in tl.range(tl.program_id(0), count * tiles, tl.num_programs(0)):
            make_tile(
                index, tiles, a, b, plus, out, rows, columns, depth, alpha, beta,
                A_TURNED, B_TURNED, ADDS, SYMMETRIC, SIDE, HALVES, BK, DIGITS,
            )
    # fmt: on
