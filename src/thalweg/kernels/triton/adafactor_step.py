"""The passes of factored Adafactor that follow when averages of rows and columns are known."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.adafactor_decision import DECAY, EPS, GAIN, INNER, OUTER, at_least, inverse_sqrt
from thalweg.kernels.triton.adafactor_sums import (
    ACROSS,
    AFTER,
    BETWEEN,
    BY_COLUMN,
    BY_MATRIX,
    BY_ROW,
    FIRST,
    ROWS,
    TENSOR,
    statistic_of,
)
from thalweg.kernels.triton.adafactor_tiles import ALONG, DOWN, END_ROW, FIRST_ROW, INDEX, MATRIX, OWNER, TILE
from thalweg.kernels.triton.numbers import as_stored, is_finite
from thalweg.kernels.triton.passes import as_parameter, gradient_factor, is_idle
from thalweg.kernels.triton.tables import COLUMNS, STATE, P, loaded


@triton.jit
def base_of(rows, row, column: tl.constexpr, DTYPE: tl.constexpr):
    """Where a row's parameter or one of its state entries begins."""
    return tl.load(rows + row * COLUMNS + column).to(tl.pointer_type(DTYPE))


@triton.jit
def step_kernel(
    rows,
    gradients,
    tensors,
    tiles,
    sums,
    numbers,
    grad_scale,
    allowed,
    figures,
    partials,
    count,
    tile_count,
    STAGE: tl.constexpr,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
    GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr,
    MIXED: tl.constexpr,
    VECTOR: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    R_DTYPE: tl.constexpr,
    C_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    AVERAGED: tl.constexpr,
    CLAMP: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile in one stage: squares of u; a rehearsal of the step; the step.

    Blocks are (LINES, WIDTH). MIXED: consecutive elements are of matrices that lie side by side.
    """
    number = tl.program_id(0)
    if STAGE == 3 or (STAGE == 2 and GUARDED):  # every other pass goes backwards, as in passes.turn
        number = tile_count - 1 - number
    tile = tiles + number * TILE
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor = tensors + row * TENSOR
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    run = tl.load(tensor + ACROSS) * after
    start = tl.load(tile + ALONG).to(tl.int64) * WIDTH
    left = run - start
    if VECTOR > 1:
        left = left // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    inner = tl.arange(0, WIDTH)[None, :]
    inside = inner < left
    matrix = tl.load(tile + MATRIX).to(tl.int64)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between  # the line of its first row
    k = tl.zeros((1, 1), tl.int32)
    if MIXED:
        k = ((start % after).to(tl.int32) + inner) % after.to(tl.int32)
    # one column in each matrix has to do with its averages of rows
    writes_rows = (inner < after - start) if MIXED else (k == start)

    # what g is multiplied by, but for its row
    eps = tl.load(numbers + EPS)
    mean = tl.load(sums + tl.load(statistic_of(tensor, BY_MATRIX) + FIRST) + matrix * after + k)
    column_entry = matrix * run + start + inner
    column_averages = loaded(sums + tl.load(statistic_of(tensor, BY_COLUMN) + FIRST) + column_entry, inside)
    if CLAMP:
        across = column_averages / at_least(mean, eps)
    else:
        across = inverse_sqrt(column_averages)
        mean = tl.where(mean > 0, mean, 1.0)
    found = tl.zeros((LINES, WIDTH), tl.float32)  # added up across threads at the end alone
    inner_scale, outer_scale, decay, gain = 0.0, 0.0, 0.0, tl.load(numbers + GAIN)
    if STAGE != 3:
        inner_scale = tl.load(figures + INNER * count + row)
        outer_scale = tl.load(figures + OUTER * count + row)
        decay = tl.load(figures + DECAY * count + row)
        uppermost = inside & (tl.load(tile + DOWN) == 0)
        if STAGE == 2:
            column_place = base_of(rows, row, STATE + 1, C_DTYPE) + column_entry
            tl.store(column_place, as_stored(column_averages, 0.0, C_DTYPE, False), uppermost)
        elif C_DTYPE == tl.float16:
            found += failures_at(column_averages.to(C_DTYPE), uppermost)

    p_base, g_base = base_of(rows, row, P, P_DTYPE), tl.load(gradients + row).to(tl.pointer_type(G_DTYPE))
    m_base, row_averages = base_of(rows, row, STATE + 2, M_DTYPE), base_of(rows, row, STATE, R_DTYPE)
    by_row = sums + tl.load(statistic_of(tensor, BY_ROW) + FIRST)
    factor = gradient_factor(numbers, grad_scale, SCALED)
    first, end = tl.load(tile + FIRST_ROW), tl.load(tile + END_ROW)
    while first < end:
        i = first + tl.arange(0, LINES)[:, None]
        line = origin + i * between
        mask = (i < end) & inside
        offset = line * run + start + inner
        p_place, g_place, m_place = p_base + offset, g_base + offset, m_base + offset
        if VECTOR > 1:
            p_place, g_place = tl.multiple_of(p_place, (1, 16)), tl.multiple_of(g_place, (1, 16))
            m_place = tl.multiple_of(m_place, (1, 16))
        g = loaded(g_place, mask) * factor
        averages = loaded(by_row + line * after + k, i < end)
        if CLAMP:
            u = g * (1.0 / at_least(tl.sqrt_rn(averages * across), eps))
        else:
            u = g * inverse_sqrt(averages / mean) * across
        if STAGE == 3:
            found += u * u
        else:
            p = loaded(p_place, mask)
            m = u * inner_scale
            if AVERAGED:
                m = (1.0 - gain) * loaded(m_place, mask) + gain * m
            new = p - (m * outer_scale + decay * p)
            stored = as_parameter(new, rows, row, offset, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
            row_mask = (i < end) & writes_rows
            if STAGE == 2:
                tl.store(p_place, stored, mask)
                if AVERAGED:
                    tl.store(m_place, as_stored(m, 0.0, M_DTYPE, False), mask)
                tl.store(row_averages + line * after + k, as_stored(averages, 0.0, R_DTYPE, False), row_mask)
            else:
                found += failures_at(stored, mask)
                if AVERAGED and M_DTYPE == tl.float16:
                    found += failures_at(m.to(M_DTYPE), mask)
                if R_DTYPE == tl.float16:
                    found += failures_at(averages.to(R_DTYPE), row_mask)
        first += LINES
    if STAGE != 2:
        tl.store(partials + tl.load(tile + INDEX), tl.sum(found))


@triton.jit
def failures_at(stored, mask):
    """1 where a value to be stored is not finite."""
    return tl.where(mask & (is_finite(stored.to(tl.float32)) == 0), 1.0, 0.0)
