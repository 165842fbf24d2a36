"""A lower bound of spectral norms, close enough: ``factors.norm_bound``, one power step from the largest column."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.kron_layout import LARGEST_ENTRY, NORM, PACE, TWIST, L
from thalweg.kernels.triton.kron_reads import extent, figure, idle, kernel, largest_of, sum_of
from thalweg.kernels.triton.products import load_panel, place


@triton.jit
def note_tile(places, largest, squares, matrix, count, x, i, j, row, column, n, pitch, BM: tl.constexpr):
    """For a bound of the norm: the largest magnitude of a tile and of its mirror image, and squares by column.

    These are in units of the largest, so that they neither overflow nor vanish.
    """
    side = tl.cdiv(n, BM)
    largest, squares = (
        place(places, largest, matrix, count, tl.float32),
        place(places, squares, matrix, count, tl.float32),
    )
    x = tl.where((i[:, None] < n) & (j[None, :] < n), x, 0.0)
    here = tl.max(tl.abs(x))
    x = x / tl.where(here > 0, here, 1.0)
    tl.store(largest + row * side + column, here)
    tl.store(squares + row * pitch + j, tl.sum(x * x, 0), j < n)
    if row != column:
        tl.store(largest + column * side + row, here)
        tl.store(squares + column * pitch + i, tl.sum(x * x, 1), i < n)


@kernel
def columns_kernel(
    places,
    figures,
    largest,
    squares,
    best,
    best_column,
    count,
    first,
    n,
    axis,
    side,
    columns_pitch,
    BM: tl.constexpr,
    SIDE: tl.constexpr,
):
    """The largest magnitude of a matrix, and of each column of tiles the column of largest norm.

    Its side x side tiles are looked at by SIDE of a row or column at a time.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    column = tl.program_id(0)
    numbers = place(places, largest, matrix, count, tl.float32)
    overall = largest_of(numbers, side * side, 1024)
    unit = tl.where(overall > 0, overall, 1.0)
    j = column * BM + tl.arange(0, BM)
    own = place(places, squares, matrix, count, tl.float32)
    totals = tl.zeros((BM,), tl.float32)
    first_row = 0
    while first_row < side:
        row = first_row + tl.arange(0, SIDE)
        ratio = tl.load(numbers + row * side + column, row < side, other=0.0) / unit
        inside = (row[:, None] < side) & (j[None, :] < n)
        found = tl.load(own + row[:, None] * columns_pitch + j[None, :], inside, other=0.0)
        totals += tl.sum(found * (ratio * ratio)[:, None], 0)
        first_row += SIDE
    totals = tl.where(j < n, totals, -1.0)
    which = tl.argmax(totals, 0)
    tl.store(place(places, best, matrix, count, tl.float32) + column, tl.max(totals))
    tl.store(place(places, best_column, matrix, count, tl.float32) + column, (column * BM + which).to(tl.float32))
    if column == 0:
        tl.store(figures + (LARGEST_ENTRY + axis) * count + matrix, overall)


@kernel
def image_kernel(
    places,
    figures,
    e,
    best,
    best_column,
    vector,
    vector_squares,
    image_squares,
    count,
    first,
    n,
    axis,
    side,
    turns,
    pitch,
    DTYPE: tl.constexpr,
    FIRST: tl.constexpr,
    SIDE: tl.constexpr,
    SUMS: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """One power step from the largest column, in two halves. The matrix is e + right, symmetric, or e, if it turns.

    FIRST: x^T times that column, in which both signs of a skew matrix cancel. Then: x times what that gave.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    largest = figure(figures, LARGEST_ENTRY + axis, matrix, count)
    largest = tl.where(largest > 0, largest, 1.0)
    base = place(places, e, matrix, count, DTYPE)
    squares = place(places, vector_squares, matrix, count, tl.float32)
    own = place(places, vector, matrix, count, tl.float32)
    right = tl.where(turns != 0, 0, extent(places, 1 - axis, matrix, count)).to(tl.float32)
    programs = tl.cdiv(n, BM)
    scale, chosen = 1.0 / largest, 0
    if FIRST:
        index = tl.arange(0, SIDE)
        norms = tl.load(place(places, best, matrix, count, tl.float32) + index, index < side, other=-1.0)
        which = tl.argmax(norms, 0)
        chosen = tl.load(place(places, best_column, matrix, count, tl.float32) + which).to(tl.int32)
    else:
        norm = tl.sqrt_rn(sum_of(squares, programs, SUMS))
        scale = scale / tl.where(norm > 0, norm, 1.0)
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    total = tl.zeros((BM, BK), tl.float32)
    begin = 0
    while begin < n:
        k = begin + tl.arange(0, BK)
        x = load_panel(base, i, k, n, pitch)
        x = x + tl.where((i[:, None] == k[None, :]) & (i[:, None] < n), right, 0.0)
        if FIRST:
            y = tl.load(base + chosen * pitch + k, k < n, other=0.0).to(tl.float32)
            y = (y + tl.where(k == chosen, right, 0.0)) / largest
        else:
            y = tl.load(own + k, k < n, other=0.0)
        total += x * y[None, :]
        begin += BK
    image = tl.sum(total, 1) * scale
    if FIRST:
        tl.store(own + i, image, i < n)
        tl.store(squares + tl.program_id(0), tl.sum(image * image))
    else:
        tl.store(place(places, image_squares, matrix, count, tl.float32) + tl.program_id(0), tl.sum(image * image))


@kernel
def norm_kernel(
    places,
    figures,
    image_squares,
    image_count,
    count,
    first,
    axis,
    turns,
    PACED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the bound is for: the pace of a factor's step, or, if it turns, the size of its rotation's direction."""
    matrix = first + tl.program_id(0)
    if idle(figures, matrix, count, 1):
        return
    total = sum_of(place(places, image_squares, matrix, count, tl.float32), image_count, BLOCK)
    bound = tl.sqrt_rn(total) * figure(figures, LARGEST_ENTRY + axis, matrix, count)
    if turns != 0:
        tl.store(figures + (TWIST + axis) * count + matrix, tl.where(bound > 0, bound, 1.0))
    else:
        old = tl.load(place(places, L + axis, matrix, count, tl.float32))
        norm, rate = PACED(old, bound + extent(places, 1 - axis, matrix, count), figures, matrix, count)
        tl.store(figures + (NORM + axis) * count + matrix, norm)
        tl.store(figures + (PACE + axis) * count + matrix, rate)
