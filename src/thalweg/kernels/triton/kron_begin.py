"""What holds for each matrix when a step of Kron begins, before a refresh, and when it ends: guard and counts."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.kron_layout import (
    ACCUMULATED,
    DUE,
    FACTOR,
    GO,
    GOOD,
    H_SQUARE,
    LARGEST,
    NORM,
    OWNER,
    REFRESH,
    START,
    STEP,
    STRENGTH,
    UPDATE_RMS,
    L,
)
from thalweg.kernels.triton.kron_reads import extent, figure, kernel, number, sum_over
from thalweg.kernels.triton.products import place


@triton.jit
def begin_matrices(
    figures,
    sign,
    grad_scale,
    allowed,
    matrix,
    count,
    mask,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What holds for a step of each matrix, whatever the rule computes."""
    nothing = tl.zeros((BLOCK,), tl.float32)
    factor = nothing + sign
    if SCALED:
        factor = factor * tl.load(grad_scale).to(tl.float32)
    go = nothing + 1.0
    if ALLOWED:
        go = tl.where(tl.load(allowed) != 0, go, 0.0)
    tl.store(figures + GO * count + matrix, go, mask)
    tl.store(figures + FACTOR * count + matrix, factor, mask)
    tl.store(figures + GOOD * count + matrix, nothing, mask)


@triton.jit
def places_of(places, which: tl.constexpr, matrix, count, mask):
    return tl.load(places + which * count + matrix, mask, other=0).to(tl.pointer_type(tl.float32))


@kernel
def strength_kernel(
    places,
    figures,
    partials,
    count,
    first,
    programs,
    pitch,
    axis,
    STRENGTH_OF: tl.constexpr,
    START_OF: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The strength of the noise, and what the first factors are scaled by. axis: that of the first one."""
    matrix = first + tl.program_id(0)
    if (figure(figures, DUE, matrix, count) == 0) | (figure(figures, GO, matrix, count) == 0):
        return
    size = extent(places, 0, matrix, count) * extent(places, 1, matrix, count)
    own = place(places, partials, matrix, count, tl.float32)
    index = tl.arange(0, BLOCK)
    mask = index < programs
    parts = tl.load(own + index, mask, other=0.0)
    largest = tl.max(parts)
    magnitude = tl.sum(tl.load(own + pitch + index, mask, other=0.0)) / size
    start = 1.0
    if SCALES_FIRST:
        unit = tl.where(largest > 0, largest, 1.0)
        ratio = parts / unit
        fourths = tl.load(own + 2 * pitch + index, mask, other=0.0) * (ratio * ratio * ratio * ratio)
        norm = tl.load(place(places, L + axis, matrix, count, tl.float32))
        start = START_OF(tl.sum(fourths) / size, largest, norm, figures, matrix, count)
    tl.store(figures + LARGEST * count + matrix, largest)
    tl.store(figures + STRENGTH * count + matrix, STRENGTH_OF(magnitude, figures, matrix, count))
    tl.store(figures + START * count + matrix, start)


@kernel
def squares_kernel(
    places, figures, partials, count, first, size, tiles, blocks, UPDATE_RMS_OF: tl.constexpr, BLOCK: tl.constexpr
):
    """The mean of the squares of h over all blocks, of this size together, and what is shown of it."""
    matrix = first + tl.program_id(0)
    total = sum_over(places, partials, matrix // blocks * blocks, blocks, tiles, count, BLOCK)
    h_square = total / size
    tl.store(figures + H_SQUARE * count + matrix, h_square)
    tl.store(figures + UPDATE_RMS * count + matrix, UPDATE_RMS_OF(h_square, figures, matrix, count))


@kernel
def settle_kernel(
    places,
    figures,
    partials,
    finite,
    count,
    first,
    tiles,
    pieces,
    blocks,
    axis,
    IS_FINE: tl.constexpr,
    GUARDED: tl.constexpr,
    COUNTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Whether one parameter is stepped, in all its pieces or in none; norms and, if the device COUNTS, its counts.

    axis: that of its first factor.
    """
    matrix = first + tl.program_id(0)
    begin = matrix // pieces * pieces
    stepped = figure(figures, GO, begin, count)
    if GUARDED:
        if stepped != 0:  # what another program has written since is what this one would find
            total, piece = 0.0, 0
            while piece < pieces:
                total += figure(figures, H_SQUARE, begin + piece, count)
                piece += blocks
            failed = sum_over(places, partials, begin, pieces, tiles, count, BLOCK)
            stepped = tl.where(IS_FINE(total, figures, begin, count) & (failed == 0), stepped, 0.0)
        tl.store(figures + GO * count + matrix, stepped)
    if (stepped != 0) & (figure(figures, GOOD, matrix, count) != 0):
        which = axis
        while which < 2:
            norm = figure(figures, NORM + which, matrix, count)
            tl.store(place(places, L + which, matrix, count, tl.float32), norm)
            which += 1
    if matrix == begin:
        tl.store(finite + number(places, OWNER, begin, count), stepped != 0)
        if COUNTED:
            step = place(places, STEP, begin, count, tl.float32)
            tl.store(step, tl.load(step) + stepped)
            if stepped != 0:
                tl.store(place(places, REFRESH, begin, count, tl.float32), figure(figures, ACCUMULATED, begin, count))
