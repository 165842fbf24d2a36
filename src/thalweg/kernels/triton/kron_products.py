"""The factors of Kron as products take them, and products with them.

Floating-point operations of a refresh of one dense factor of size n, for a gradient of n x k: n^3 + 2 n^2 k for P and
P y (4 n^2 k without P), n^2 k for the gram matrix, 6 n^3 for the step and its rotation (4 n^3 under "quad"), then
n^3 + 2 n^2 k again to precondition. Symmetric results are computed on one side of their diagonal.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.kron_bounds import note_tile
from thalweg.kernels.triton.kron_layout import FACTOR, GOOD, SCALE, START, Q
from thalweg.kernels.triton.kron_reads import extent, figure, idle, kernel
from thalweg.kernels.triton.numbers import as_stored
from thalweg.kernels.triton.products import (
    load_panel,
    place,
    rows_times_rows,
    store_both,
    store_panel,
    tile_of,
    tile_place,
    triangle_tile_of,
)


@triton.jit
def load_state(base, i, j, n, stride, ALIGNED: tl.constexpr):
    """A tile of a factor as it is stored, in float32."""
    if ALIGNED:
        n = n // 16 * 16
    mask = (i[:, None] < n) & (j[None, :] < n)
    return tl.load(tile_place(base, i, j, stride, ALIGNED), mask, other=0.0).to(tl.float32)


@kernel
def turn_kernel(
    places,
    figures,
    source,
    turned,
    straight,
    count,
    first,
    n,
    stride,
    axis,
    refreshes,
    operands,
    state,
    pitch,
    Q_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRAIGHT: tl.constexpr,
    CUTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A factor as products take it, transposed and if asked as it is; if asked, a new one goes into the state.

    refreshes: what a refresh begins with; else what it came to, or the factor as it was.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, refreshes):
        return
    across = tl.cdiv(n, BLOCK)
    i = tl.program_id(0) // across * BLOCK + tl.arange(0, BLOCK)
    j = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    old, own = place(places, Q + axis, matrix, count, Q_DTYPE), extent(places, axis, matrix, count)
    renewed = figure(figures, GOOD, matrix, count) != 0
    if refreshes != 0:
        q = load_state(old, i, j, own, stride, ALIGNED) * figure(figures, START, matrix, count)
    elif renewed:
        new = place(places, source, matrix, count, tl.float32)
        q = load_panel(new, i, j, n, pitch) * figure(figures, SCALE + axis, matrix, count)
    else:
        q = load_state(old, i, j, own, stride, ALIGNED)
    if operands != 0:
        store_panel(place(places, turned, matrix, count, DTYPE), j, i, tl.trans(q), n, n, pitch, DTYPE, CUTS)
        if STRAIGHT:
            store_panel(place(places, straight, matrix, count, DTYPE), i, j, q, n, n, pitch, DTYPE, CUTS)
    if (state != 0) & renewed:
        if ALIGNED:
            own = own // 16 * 16
        mask = (i[:, None] < own) & (j[None, :] < own)
        tl.store(tile_place(old, i, j, stride, ALIGNED), as_stored(q, 0.0, Q_DTYPE, False), mask)


@kernel
def multiply_kernel(
    places,
    figures,
    a,
    b,
    out,
    turned,
    scales,
    sums,
    count,
    first,
    rows,
    columns,
    depth,
    refreshes,
    as_it_lies,
    a_pitch,
    b_pitch,
    pitch,
    turned_pitch,
    sums_pitch,
    DTYPE: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    SCALES: tl.constexpr,
    SUMS: tl.constexpr,
    TURNED: tl.constexpr,
    CUTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """out = a b^T, with what surrounds it.

    SCALES: "rows" or "columns" of it are multiplied by numbers. TURNED: its transpose is written as well.
    SUMS: of squares, of each column in this tile ("columns"), or of the whole tile ("tile").
    as_it_lies: an operand is the user's gradient, without its factor.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, refreshes):
        return
    row, column = tile_of(tl.program_id(0), tl.cdiv(rows, BM), tl.cdiv(columns, BN), 8)
    i, j = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    a_place, b_place = place(places, a, matrix, count, DTYPE), place(places, b, matrix, count, DTYPE)
    x = rows_times_rows(a_place, b_place, row, column, rows, columns, 0, depth, a_pitch, b_pitch, DESCRIBED, BM, BN, BK)
    if as_it_lies != 0:
        x = x * figure(figures, FACTOR, matrix, count)
    if SCALES == "rows":
        scale = tl.load(place(places, scales, matrix, count, tl.float32) + i, i < rows, other=0.0)
        x = x * scale[:, None]
    elif SCALES == "columns":
        scale = tl.load(place(places, scales, matrix, count, tl.float32) + j, j < columns, other=0.0)
        x = x * scale[None, :]
    store_panel(place(places, out, matrix, count, OUT_DTYPE), i, j, x, rows, columns, pitch, OUT_DTYPE, CUTS)
    if TURNED:
        panel = place(places, turned, matrix, count, OUT_DTYPE)
        store_panel(panel, j, i, tl.trans(x), columns, rows, turned_pitch, OUT_DTYPE, CUTS)
    if SUMS == "columns":
        squares = tl.sum(tl.where(i[:, None] < rows, x * x, 0.0), 0)
        tl.store(place(places, sums, matrix, count, tl.float32) + row * sums_pitch + j, squares, j < columns)
    elif SUMS == "tile":
        inside = (i[:, None] < rows) & (j[None, :] < columns)
        total = tl.sum(tl.where(inside, x * x, 0.0))
        tl.store(place(places, sums, matrix, count, tl.float32) + tl.program_id(0), total)


# ---- symmetric products


@triton.jit
def store_error(panel, x, i, j, row, column, n, pitch, right, DTYPE: tl.constexpr, CUTS: tl.constexpr):
    """A tile of a gram matrix less what it should be, and its mirror image."""
    x = x - tl.where(i[:, None] == j[None, :], right, 0.0)
    store_both(panel, x, x, i, j, row, column, n, pitch, DTYPE, CUTS)


@kernel
def symmetric_kernel(
    places,
    figures,
    a,
    out,
    largest,
    squares,
    count,
    first,
    n,
    axis,
    depth,
    refreshes,
    parts,
    length,
    a_pitch,
    pitch,
    columns_pitch,
    DTYPE: tl.constexpr,
    GRAM: tl.constexpr,
    PARTS: tl.constexpr,
    CUTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """a a^T. GRAM: less what it should be, and noted for a bound of its norm. PARTS: only sums over parts of rows."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, refreshes):
        return
    tile = tl.program_id(0)
    begin, end = 0, depth
    if PARTS:
        begin = tile % parts * length
        end = tl.minimum(begin + length, depth)
        tile = tile // parts
    row, column = triangle_tile_of(tile)
    i, j = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    own = place(places, a, matrix, count, DTYPE)
    x = rows_times_rows(own, own, row, column, n, n, begin, end, a_pitch, a_pitch, DESCRIBED, BM, BN, BK)
    if PARTS:
        panel = place(places, out, matrix, count, tl.float32) + (tl.program_id(0) % parts).to(tl.int64) * n * pitch
        store_panel(panel, i, j, x, n, n, pitch, tl.float32, False)
    elif GRAM:
        note_tile(places, largest, squares, matrix, count, x, i, j, row, column, n, columns_pitch, BM)
        panel = place(places, out, matrix, count, DTYPE)
        right = extent(places, 1 - axis, matrix, count).to(tl.float32)
        store_error(panel, x, i, j, row, column, n, pitch, right, DTYPE, CUTS)
    else:
        store_both(place(places, out, matrix, count, DTYPE), x, x, i, j, row, column, n, pitch, DTYPE, CUTS)


@kernel
def gather_kernel(
    places,
    figures,
    sums,
    out,
    largest,
    squares,
    count,
    first,
    n,
    axis,
    parts,
    sums_pitch,
    pitch,
    columns_pitch,
    DTYPE: tl.constexpr,
    CUTS: tl.constexpr,
    BM: tl.constexpr,
):
    """A gram matrix from sums over parts of its rows."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    row, column = triangle_tile_of(tl.program_id(0))
    i, j = row * BM + tl.arange(0, BM), column * BM + tl.arange(0, BM)
    x = tl.zeros((BM, BM), tl.float32)
    panel = place(places, sums, matrix, count, tl.float32)
    part = 0
    while part < parts:
        x += load_panel(panel, i, j, n, sums_pitch)
        panel += n.to(tl.int64) * sums_pitch
        part += 1
    note_tile(places, largest, squares, matrix, count, x, i, j, row, column, n, columns_pitch, BM)
    panel, right = place(places, out, matrix, count, DTYPE), extent(places, 1 - axis, matrix, count).to(tl.float32)
    store_error(panel, x, i, j, row, column, n, pitch, right, DTYPE, CUTS)
