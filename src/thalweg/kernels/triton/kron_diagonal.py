"""Diagonal factors of Kron, and what all factors of a matrix have in common at the end of a refresh."""

from __future__ import annotations

import triton.language as tl

from thalweg.kernels.triton.kron_layout import GOOD, LARGEST, NORM, SCALE, START, L, Q
from thalweg.kernels.triton.kron_reads import extent, figure, idle, kernel, largest_of, sum_of
from thalweg.kernels.triton.numbers import as_stored, is_finite
from thalweg.kernels.triton.products import load_panel, place, store_panel


@kernel
def diagonal_kernel(
    places,
    figures,
    stepped,
    squares,
    count,
    first,
    n,
    stride,
    axis,
    refreshes,
    operands,
    state,
    Q_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The squares of a factor, by which gradients are multiplied; if asked, a new one goes into the state.

    refreshes: what a refresh begins with; else what it came to, or the factor as it was.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, refreshes):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    old = place(places, Q + axis, matrix, count, Q_DTYPE) + i * stride
    renewed = figure(figures, GOOD, matrix, count) != 0
    if refreshes:
        q = tl.load(old, i < n, other=0.0).to(tl.float32) * figure(figures, START, matrix, count)
    elif renewed:
        new = place(places, stepped, matrix, count, tl.float32) + i
        q = tl.load(new, i < n, other=0.0) * figure(figures, SCALE + axis, matrix, count)
    else:
        q = tl.load(old, i < n, other=0.0).to(tl.float32)
    if operands != 0:
        tl.store(place(places, squares, matrix, count, tl.float32) + i, q * q, i < n)
    if (state != 0) & renewed:
        tl.store(old, as_stored(q, 0.0, Q_DTYPE, False), i < n)


@kernel
def scaled_kernel(
    places,
    figures,
    a,
    out,
    row_scales,
    column_scales,
    row_sums,
    column_sums,
    sums,
    count,
    first,
    rows,
    columns,
    pitch,
    row_pitch,
    column_pitch,
    ROWS: tl.constexpr,
    REFRESHES: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A gradient without dense factors, times those it has. ROWS: its rows have a factor, and not only its columns.

    REFRESHES: only sums of squares are wanted, of rows and columns; else the product, and the sum over its tile.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, REFRESHES):
        return
    across = tl.cdiv(columns, WIDE)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    i, j = row * HIGH + tl.arange(0, HIGH), column * WIDE + tl.arange(0, WIDE)
    x = load_panel(place(places, a, matrix, count, tl.float32), i, j, rows, pitch)
    x = x * tl.load(place(places, column_scales, matrix, count, tl.float32) + j, j < columns, other=0.0)[None, :]
    if ROWS:
        x = x * tl.load(place(places, row_scales, matrix, count, tl.float32) + i, i < rows, other=0.0)[:, None]
    if REFRESHES:
        own = place(places, column_sums, matrix, count, tl.float32) + row * column_pitch + j
        tl.store(own, tl.sum(x * x, 0), j < tl.where(row * HIGH < rows, columns, 0))
        if ROWS:
            own = place(places, row_sums, matrix, count, tl.float32) + column * row_pitch + i
            tl.store(own, tl.sum(x * x, 1), i < tl.where(column * WIDE < columns, rows, 0))
    else:
        store_panel(place(places, out, matrix, count, tl.float32), i, j, x, rows, columns, pitch, tl.float32, False)
        tl.store(place(places, sums, matrix, count, tl.float32) + tl.program_id(0), tl.sum(x * x))


@kernel
def left_kernel(
    places,
    figures,
    sums,
    left,
    left_largest,
    count,
    first,
    n,
    parts,
    sums_pitch,
    BLOCK: tl.constexpr,
):
    """The diagonal of a gram matrix from its parts, and its largest entry."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = place(places, sums, matrix, count, tl.float32) + i
    total = tl.zeros((BLOCK,), tl.float32)
    part = 0
    while part < parts:
        total += tl.load(own + part * sums_pitch, i < n, other=0.0)
        part += 1
    tl.store(place(places, left, matrix, count, tl.float32) + i, total, i < n)
    tl.store(place(places, left_largest, matrix, count, tl.float32) + tl.program_id(0), tl.max(total))


@kernel
def diagonal_step_kernel(
    places,
    figures,
    left,
    left_largest,
    stepped,
    largest,
    sums,
    count,
    first,
    n,
    stride,
    axis,
    Q_DTYPE: tl.constexpr,
    PACED: tl.constexpr,
    MOVED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A factor after one step, not yet balanced; its largest magnitude and its sum."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    bound = largest_of(place(places, left_largest, matrix, count, tl.float32), tl.cdiv(n, BLOCK), 64)
    old = tl.load(place(places, L + axis, matrix, count, tl.float32))
    right = extent(places, 1 - axis, matrix, count).to(tl.float32)
    norm, rate = PACED(old, bound + right, figures, matrix, count)
    if tl.program_id(0) == 0:
        tl.store(figures + (NORM + axis) * count + matrix, norm)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    state = place(places, Q + axis, matrix, count, Q_DTYPE) + i * stride
    q = tl.load(state, i < n, other=0.0).to(tl.float32) * figure(figures, START, matrix, count)
    own = tl.load(place(places, left, matrix, count, tl.float32) + i, i < n, other=0.0)
    q = MOVED(q, own, right, rate, figures, matrix, count)
    tl.store(place(places, stepped, matrix, count, tl.float32) + i, q, i < n)
    tl.store(place(places, largest, matrix, count, tl.float32) + tl.program_id(0), tl.max(tl.abs(q)))
    tl.store(place(places, sums, matrix, count, tl.float32) + tl.program_id(0), tl.sum(q))


@kernel
def balance_kernel(
    places,
    figures,
    row_largest,
    row_sums,
    row_count,
    column_largest,
    column_sums,
    column_count,
    count,
    first,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What gives all factors the same largest entry, and whether they are good: finite, and learned from something."""
    matrix = first + tl.program_id(0)
    if idle(figures, matrix, count, 1):
        return
    of_columns = largest_of(place(places, column_largest, matrix, count, tl.float32), column_count, BLOCK)
    total = sum_of(place(places, column_sums, matrix, count, tl.float32), column_count, BLOCK)
    total += figure(figures, NORM + 1, matrix, count)
    if ROWS:
        of_rows = largest_of(place(places, row_largest, matrix, count, tl.float32), row_count, BLOCK)
        total += sum_of(place(places, row_sums, matrix, count, tl.float32), row_count, BLOCK)
        total += figure(figures, NORM, matrix, count)
        mean = tl.exp((tl.log(of_rows) + tl.log(of_columns)) / 2)
        tl.store(figures + SCALE * count + matrix, mean / of_rows)
    else:
        mean = tl.exp(tl.log(of_columns))
    scale = mean / of_columns
    tl.store(figures + (SCALE + 1) * count + matrix, scale)
    good = is_finite(total * scale) & (figure(figures, LARGEST, matrix, count) > 0)
    tl.store(figures + GOOD * count + matrix, tl.where(good, 1.0, 0.0))
