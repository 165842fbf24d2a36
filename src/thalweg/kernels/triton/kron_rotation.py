"""One step of a dense factor of Kron: ``refresh.one_step``, with its rotation or made symmetric again."""

from __future__ import annotations

import triton.language as tl

from thalweg.kernels.triton.kron_bounds import note_tile
from thalweg.kernels.triton.kron_layout import ANGLE, PACE, START, TWIST, Q
from thalweg.kernels.triton.kron_products import load_state
from thalweg.kernels.triton.kron_reads import extent, figure, idle, kernel, sum_of
from thalweg.kernels.triton.products import load_panel, place, square_product, store_both, store_panel, triangle_tile_of


@kernel
def stepped_kernel(
    places,
    figures,
    error,
    turned,
    stepped,
    out,
    count,
    first,
    n,
    stride,
    axis,
    pitch,
    Q_DTYPE: tl.constexpr,
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    ALIGNED: tl.constexpr,
    CUTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """q - rate (left - right) q.

    HALF: "": the whole step. "left" and "right": half a step from either side, the first as products take it as well.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    rate = figure(figures, PACE + axis, matrix, count)
    if HALF != "":
        rate = rate / 2
    a, b = place(places, error, matrix, count, DTYPE), place(places, turned, matrix, count, DTYPE)
    new = place(places, stepped, matrix, count, tl.float32)
    if HALF == "right":
        i, j, x = square_product(b, a, n, pitch, DESCRIBED, BM, BN, BK)
        q = load_panel(new, i, j, n, pitch)
    else:
        i, j, x = square_product(a, b, n, pitch, DESCRIBED, BM, BN, BK)
        own = extent(places, axis, matrix, count)
        q = load_state(place(places, Q + axis, matrix, count, Q_DTYPE), i, j, own, stride, ALIGNED)
        q = q * figure(figures, START, matrix, count)
    q = q - rate * x
    store_panel(new, i, j, q, n, n, pitch, tl.float32, False)
    if HALF == "left":
        store_panel(place(places, out, matrix, count, DTYPE), i, j, q, n, n, pitch, DTYPE, CUTS)


@kernel
def skew_kernel(
    places,
    figures,
    stepped,
    turned,
    skew,
    largest,
    squares,
    first_sums,
    count,
    first,
    n,
    pitch,
    columns_pitch,
    DTYPE: tl.constexpr,
    CUTS: tl.constexpr,
    BM: tl.constexpr,
):
    """r = q^T - q, noted for a bound of its norm, and the sum of r * q^T, which is half that of its squares.

    q^T as products take it is written on the way.
    """
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    row, column = triangle_tile_of(tl.program_id(0))
    i, j = row * BM + tl.arange(0, BM), column * BM + tl.arange(0, BM)
    q = place(places, stepped, matrix, count, tl.float32)
    straight, mirrored = load_panel(q, i, j, n, pitch), tl.trans(load_panel(q, j, i, n, pitch))
    panel = place(places, turned, matrix, count, DTYPE)
    store_both(panel, mirrored, straight, i, j, row, column, n, pitch, DTYPE, CUTS)
    r = mirrored - straight
    note_tile(places, largest, squares, matrix, count, r, i, j, row, column, n, columns_pitch, BM)
    total = tl.sum(r * r)
    total = tl.where(row == column, total / 2, total)
    tl.store(place(places, first_sums, matrix, count, tl.float32) + tl.program_id(0), total)
    store_both(place(places, skew, matrix, count, DTYPE), r, -r, i, j, row, column, n, pitch, DTYPE, CUTS)


@kernel
def turning_kernel(
    places,
    figures,
    skew,
    b,
    product,
    turned,
    second,
    count,
    first,
    n,
    axis,
    pitch,
    DTYPE: tl.constexpr,
    CUTS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """r q with r of norm 1, both ways, and the sum of r^T * r q."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    size = figure(figures, TWIST + axis, matrix, count)
    a = place(places, skew, matrix, count, DTYPE)
    i, j, x = square_product(a, place(places, b, matrix, count, DTYPE), n, pitch, DESCRIBED, BM, BN, BK)
    x = x / size
    total = -tl.sum(load_panel(a, i, j, n, pitch) * x) / size
    tl.store(place(places, second, matrix, count, tl.float32) + tl.program_id(0), total)
    store_panel(place(places, product, matrix, count, DTYPE), i, j, x, n, n, pitch, DTYPE, CUTS)
    store_panel(place(places, turned, matrix, count, DTYPE), j, i, tl.trans(x), n, n, pitch, DTYPE, CUTS)


@kernel
def angle_kernel(
    places,
    figures,
    first_sums,
    first_count,
    second,
    second_count,
    count,
    first,
    axis,
    ANGLE_OF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How far a factor is to be rotated."""
    matrix = first + tl.program_id(0)
    if idle(figures, matrix, count, 1):
        return
    slope = sum_of(place(places, first_sums, matrix, count, tl.float32), first_count, BLOCK)
    slope = slope / figure(figures, TWIST + axis, matrix, count)
    curvature = sum_of(place(places, second, matrix, count, tl.float32), second_count, BLOCK)
    tl.store(figures + (ANGLE + axis) * count + matrix, ANGLE_OF(slope, curvature, figures, matrix, count))


@kernel
def rotated_kernel(
    places,
    figures,
    skew,
    b,
    product,
    stepped,
    largest,
    sums,
    count,
    first,
    n,
    axis,
    pitch,
    DTYPE: tl.constexpr,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """q + a (r q + a/2 r r q), with the a of ``factors.rotate_to_symmetric``; its largest magnitude and its sum."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    size, angle = figure(figures, TWIST + axis, matrix, count), figure(figures, ANGLE + axis, matrix, count)
    a = place(places, skew, matrix, count, DTYPE)
    i, j, x = square_product(a, place(places, b, matrix, count, DTYPE), n, pitch, DESCRIBED, BM, BN, BK)
    x = angle * (load_panel(place(places, product, matrix, count, DTYPE), i, j, n, pitch) + (angle / 2 / size) * x)
    new = place(places, stepped, matrix, count, tl.float32)
    q = load_panel(new, i, j, n, pitch) + x
    store_panel(new, i, j, q, n, n, pitch, tl.float32, False)
    q = tl.where((i[:, None] < n) & (j[None, :] < n), q, 0.0)
    tl.store(place(places, largest, matrix, count, tl.float32) + tl.program_id(0), tl.max(tl.abs(q)))
    tl.store(place(places, sums, matrix, count, tl.float32) + tl.program_id(0), tl.sum(q))


@kernel
def symmetrized_kernel(
    places,
    figures,
    stepped,
    largest,
    sums,
    count,
    first,
    n,
    pitch,
    BM: tl.constexpr,
):
    """(q + q^T) / 2; its largest magnitude and its sum."""
    matrix = first + tl.program_id(1)
    if idle(figures, matrix, count, 1):
        return
    row, column = triangle_tile_of(tl.program_id(0))
    i, j = row * BM + tl.arange(0, BM), column * BM + tl.arange(0, BM)
    q = place(places, stepped, matrix, count, tl.float32)
    x = (load_panel(q, i, j, n, pitch) + tl.trans(load_panel(q, j, i, n, pitch))) / 2
    total = tl.sum(x)
    tl.store(place(places, largest, matrix, count, tl.float32) + tl.program_id(0), tl.max(tl.abs(x)))
    tl.store(
        place(places, sums, matrix, count, tl.float32) + tl.program_id(0), tl.where(row == column, total, 2 * total)
    )
    tl.debug_barrier()  # all of a tile on the diagonal is read before any of it is written
    store_both(q, x, x, i, j, row, column, n, pitch, tl.float32, False)
