"""What a step of Kron does element by element: the gradient as products take it, and what becomes of their results.

Bytes an element in float32, beside the products: measure 4, noised 8 (both only where factors are refreshed), the
gradient as an operand 8 (not where it can be used as it lies), the step 24 (h, p and momentum; p and momentum written).
Momentum in eight bits is decoded where it is read, by all of them, and encoded by the step: tiles hold whole groups.
"""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.coded import store_coded
from thalweg.kernels.triton.kron_layout import (
    DUE,
    FACTOR,
    GO,
    KEY_ROUNDING,
    KEY_U,
    KEY_V,
    M_SCALES,
    POSITION,
    STRENGTH,
    G,
    M,
    P,
    T,
)
from thalweg.kernels.triton.kron_reads import extent, figure, kernel, number
from thalweg.kernels.triton.numbers import as_stored, half_of, is_finite, mix, normal, random_bits
from thalweg.kernels.triton.products import place, store_panel, tile_place


@triton.jit
def element_tile(places, tile, columns, matrix, count, ALIGNED: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Which rows and columns are in a tile, and a mask of those that there are. columns: of the largest block."""
    across = tl.cdiv(columns, WIDE)
    i = tile // across * HIGH + tl.arange(0, HIGH)
    j = tile % across * WIDE + tl.arange(0, WIDE)
    own = extent(places, 1, matrix, count)
    if ALIGNED:
        own = own // 16 * 16  # as it is: so the compiler sees that masks hold for whole vectors
    return i, j, (i[:, None] < extent(places, 0, matrix, count)) & (j[None, :] < own)


@triton.jit
def scales_of_tile(
    places,
    tile,
    columns,
    stride,
    mask,
    matrix,
    count,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Places of the scales of a tile's groups, row by row, and a mask of those that there are. GROUP: 0 if none are."""
    base = place(places, M_SCALES, matrix, count, tl.float32)
    if GROUP == 0:
        return base, mask
    else:
        across = tl.cdiv(columns, WIDE)
        index = tl.arange(0, HIGH * WIDE // GROUP)
        i = tile // across * HIGH + index // (WIDE // GROUP)
        j = tile % across * (WIDE // GROUP) + index % (WIDE // GROUP)
        inside = (i < extent(places, 0, matrix, count)) & (j < extent(places, 1, matrix, count) // GROUP)
        return base + i * (stride // GROUP) + j, inside


@kernel
def measure_kernel(
    places,
    figures,
    partials,
    count,
    first,
    rows,
    columns,
    stride,
    programs,
    pitch,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    LEARNED: tl.constexpr,
    SCALES_FIRST: tl.constexpr,
    ALIGNED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The largest magnitude of y, their sum, and the sum of fourth powers in units of the largest."""
    matrix = first + tl.program_id(1)
    if (figure(figures, DUE, matrix, count) == 0) | (figure(figures, GO, matrix, count) == 0):
        return
    factor = figure(figures, FACTOR, matrix, count)
    p, m = place(places, P, matrix, count, P_DTYPE), place(places, M, matrix, count, M_DTYPE)
    g = place(places, G, matrix, count, G_DTYPE)
    largest, total, fourth = 0.0, 0.0, 0.0
    tile, tiles = tl.program_id(0), tl.cdiv(rows, HIGH) * tl.cdiv(columns, WIDE)
    while tile < tiles:
        i, j, mask = element_tile(places, tile, columns, matrix, count, ALIGNED, HIGH, WIDE)
        g_places = tile_place(g, i, j, stride, ALIGNED)
        p_places, m_places = tile_place(p, i, j, stride, ALIGNED), tile_place(m, i, j, stride, ALIGNED)
        s_places, groups = scales_of_tile(places, tile, columns, stride, mask, matrix, count, HIGH, WIDE, GROUP)
        y = LEARNED(g_places, p_places, m_places, s_places, mask, groups, factor, GROUP, figures, matrix, count)
        size_of = tl.abs(tl.where(mask, y, 0.0))
        here = tl.max(size_of)
        total += tl.sum(size_of)
        if SCALES_FIRST:
            unit = tl.maximum(largest, here)
            unit = tl.where(unit > 0, unit, 1.0)
            small = size_of / unit
            before = largest / unit
            fourth = fourth * (before * before * before * before) + tl.sum(small * small * small * small)
        largest = tl.maximum(largest, here)
        tile += programs
    out = place(places, partials, matrix, count, tl.float32) + tl.program_id(0)
    tl.store(out, largest)
    tl.store(out + pitch, total)
    tl.store(out + 2 * pitch, fourth)


@triton.jit
def uniform_nearby(key, t, position):
    """``numbers.uniform`` for positions below 2**32, whose upper half is the same for all."""
    bits = mix(mix(position ^ mix(key ^ tl.full((), 0x27D4EB2F, tl.uint32))) ^ mix(key ^ t))
    return (bits >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.960464477539063e-08


@triton.jit
def normal_nearby(key_of_u, key_of_v, t, position):
    u, v = uniform_nearby(key_of_u, t, position), uniform_nearby(key_of_v, t, position)
    return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * v)


@kernel
def operand_kernel(
    places,
    figures,
    out,
    count,
    first,
    rows,
    columns,
    stride,
    pitch,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_DTYPE: tl.constexpr,
    SHOWN: tl.constexpr,
    NOISY: tl.constexpr,
    FAR: tl.constexpr,
    ACROSS: tl.constexpr,
    CUTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What products take: x, or with noise y, from which factors learn. SHOWN: which of them.

    ACROSS: transposed. FAR: positions may need more than 32 bits.
    """
    matrix = first + tl.program_id(1)
    if figure(figures, GO, matrix, count) == 0:
        return
    if NOISY:
        if figure(figures, DUE, matrix, count) == 0:
            return
    tile = tl.program_id(0)
    i, j, mask = element_tile(places, tile, columns, matrix, count, ALIGNED, HIGH, WIDE)
    p_places = tile_place(place(places, P, matrix, count, P_DTYPE), i, j, stride, ALIGNED)
    m_places = tile_place(place(places, M, matrix, count, M_DTYPE), i, j, stride, ALIGNED)
    g_places = tile_place(place(places, G, matrix, count, G_DTYPE), i, j, stride, ALIGNED)
    factor = figure(figures, FACTOR, matrix, count)
    s_places, groups = scales_of_tile(places, tile, columns, stride, mask, matrix, count, HIGH, WIDE, GROUP)
    x = SHOWN(g_places, p_places, m_places, s_places, mask, groups, factor, GROUP, figures, matrix, count)
    if NOISY:
        t = figure(figures, T, matrix, count).to(tl.uint32)
        u, v = number(places, KEY_U, matrix, count).to(tl.uint32), number(places, KEY_V, matrix, count).to(tl.uint32)
        begin = number(places, POSITION, matrix, count)
        if FAR:
            noise = normal(u, v, t, begin + i[:, None].to(tl.int64) * stride + j[None, :])
        else:
            noise = normal_nearby(u, v, t, (begin.to(tl.int32) + i[:, None] * stride + j[None, :]).to(tl.uint32))
        x = x + figure(figures, STRENGTH, matrix, count) * noise
    x = tl.where(mask, x, 0.0)
    panel = place(places, out, matrix, count, OUT_DTYPE)
    if ACROSS:
        store_panel(panel, j, i, tl.trans(x), columns, rows, pitch, OUT_DTYPE, CUTS)
    else:
        store_panel(panel, i, j, x, rows, columns, pitch, OUT_DTYPE, CUTS)


@kernel
def step_kernel(
    places,
    figures,
    h_panel,
    partials,
    count,
    first,
    rows,
    columns,
    stride,
    pitch,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    GROUP: tl.constexpr,
    STEPPED: tl.constexpr,
    KEEPS_MOMENTUM: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    REHEARSAL: tl.constexpr,
    ALIGNED: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The parameter and its momentum after the step. REHEARSAL: count what would not be finite, write nothing."""
    matrix = first + tl.program_id(1)
    if figure(figures, GO, matrix, count) == 0:
        return
    tile = tl.program_id(0)
    i, j, mask = element_tile(places, tile, columns, matrix, count, ALIGNED, HIGH, WIDE)
    p_places = tile_place(place(places, P, matrix, count, P_DTYPE), i, j, stride, ALIGNED)
    m_places = tile_place(place(places, M, matrix, count, M_DTYPE), i, j, stride, ALIGNED)
    h = tl.load(tile_place(place(places, h_panel, matrix, count, tl.float32), i, j, pitch, True), mask, other=0.0)
    g_places = tile_place(place(places, G, matrix, count, G_DTYPE), i, j, stride, ALIGNED)
    factor = figure(figures, FACTOR, matrix, count)
    s_places, groups = scales_of_tile(places, tile, columns, stride, mask, matrix, count, HIGH, WIDE, GROUP)
    new, m = STEPPED(h, g_places, p_places, m_places, s_places, mask, groups, factor, GROUP, figures, matrix, count)
    chance = 0.0
    if STOCHASTIC:
        position = number(places, POSITION, matrix, count) + i[:, None].to(tl.int64) * stride + j[None, :]
        key = number(places, KEY_ROUNDING, matrix, count).to(tl.uint32)
        chance = half_of(random_bits(key, figure(figures, T, matrix, count).to(tl.uint32), position), False)
    new = as_stored(new, chance, P_DTYPE, STOCHASTIC)
    if GROUP == 0:
        m = as_stored(m, 0.0, M_DTYPE, False)
    if REHEARSAL:
        fine = is_finite(new.to(tl.float32))
        if M_DTYPE == tl.float16 and KEEPS_MOMENTUM:
            fine = fine & is_finite(m.to(tl.float32))
        failed = tl.sum(tl.where(fine | ~mask, 0.0, 1.0))
        tl.store(place(places, partials, matrix, count, tl.float32) + tl.program_id(0), failed)
    else:
        tl.store(p_places, new, mask)
        if KEEPS_MOMENTUM:
            if GROUP == 0:
                tl.store(m_places, m, mask)
            else:
                store_coded(m_places, s_places, m, 0.0, mask, groups, GROUP, False)
