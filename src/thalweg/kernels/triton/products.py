"""Batched matrix products on tensor cores, in one form: out[i, j] is the product of row i of a and row j of b.

Both operands lie along the axis that is summed over, which is the only way that tensor cores take float32 numbers.
Symmetric matrices are their own transposes, and others are written both ways by the kernel that makes them.

A *panel* is a matrix in scratch memory: rows of ``pitch`` elements, of which those behind the last column are zeros, so
that no product needs to know where a row ends. Where each matrix of a batch has its panels, and its parameter, state
and gradient, says one table of addresses on the device: (columns, matrices), int64.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from thalweg.kernels.triton.numbers import as_stored, is_finite

#: Whether Triton interprets kernels: then none of their numbers can be the bound of a range.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: Rows of panels are padded to a multiple of this, which every block of a product divides.
PITCH = 64


def ceiling(size: int, part: int) -> int:
    """How many parts cover a size."""
    return -(-size // part)


class Blocks(NamedTuple):
    """The tile of a product that one program computes, and how."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    #: Whether the GPU fetches tiles of operands by itself.
    described: bool = False

    def tiles(self, rows: int, columns: int) -> int:
        return ceiling(rows, self.rows) * ceiling(columns, self.columns)

    def options(self) -> dict[str, int]:
        """What a kernel takes."""
        blocks = dict(BM=self.rows, BN=self.columns, BK=self.depth, DESCRIBED=self.described)
        return dict(**blocks, num_warps=self.warps, num_stages=self.stages)


class Device(NamedTuple):
    """What the choice of blocks depends on."""

    processors: int
    #: Bytes of shared memory that a program may use.
    shared: int
    #: Bytes of memory.
    memory: int
    #: Whether float32 operands are cut to 19 bits on their way into tensor cores.
    cuts: bool
    #: Whether it can fetch tiles by descriptors of matrices, which is faster.
    describes: bool = False
    #: Bytes of scratch memory that one optimizer may use, however little memory there is.
    least_scratch: int = 256 * 2**20
    #: Elements of rows beyond which several programs share a tile of their gram matrix.
    long: int = 2048


def device_of(device: torch.device) -> Device:
    if device.type == "meta":  # nothing will run: what an H100 with 80 GiB would be asked for
        return Device(132, 232_448, 80 * 2**30, cuts=True, describes=True)
    if device.type != "cuda":
        return Device(1, 2**16, 2**32, cuts=False)
    found = torch.cuda.get_device_properties(device)
    shared = getattr(found, "shared_memory_per_block_optin", 2**16)
    describes = torch.version.hip is None and found.major >= 9 and hasattr(tl, "make_tensor_descriptor")
    return Device(found.multi_processor_count, shared, found.total_memory, cuts=True, describes=describes)


def padded(size: int) -> int:
    return ceiling(size, PITCH) * PITCH


def blocks_for(device: Device, rows: int, columns: int, width: int, *, square: bool = False) -> Blocks:
    """Large blocks for all but small matrices. width: bytes of an operand's element. square: tiles must be.

    Measured on an H200: 128 x 256 gives up to 335 (float32) and 690 (bfloat16) TFLOP/s.
    """
    depth = 128 // width
    middle = Blocks(128, 128, depth, 4 if square else 8, 4)
    for blocks in (middle if square else Blocks(128, 256, depth, 8, 4), middle, Blocks(64, 64, depth, 4, 4)):
        stages = min(blocks.stages, device.shared // ((blocks.rows + blocks.columns) * 128))
        if stages >= 3 and min(rows, columns) >= blocks.columns:
            return blocks._replace(stages=stages, described=device.describes)
    return blocks._replace(stages=min(stages, 3), described=device.describes)


# ---- what programs do


@triton.jit
def place(places, column, matrix, count, DTYPE: tl.constexpr):
    """The address of something that belongs to a matrix."""
    return tl.load(places + column * count + matrix).to(tl.pointer_type(DTYPE))


@triton.jit
def tile_place(base, i, j, pitch, ALIGNED: tl.constexpr):
    """Pointers to a tile. ALIGNED: every row begins at a multiple of 16 bytes, so wide loads and stores will do."""
    places = base + i[:, None] * pitch + j[None, :]
    if ALIGNED:
        places = tl.multiple_of(places, (16, 16))
    return places


@triton.jit
def tile_of(program, rows, columns, GROUP: tl.constexpr):
    """Which of rows x columns tiles is a program's: those that run together share what they read."""
    group = program // (GROUP * columns)
    first = group * GROUP
    high = tl.minimum(rows - first, GROUP)
    inside = program % (GROUP * columns)
    return first + inside % high, inside // high


@triton.jit
def triangle_tile_of(program):
    """Which tile on or above the diagonal is a program's, column by column."""
    j = ((tl.sqrt(8.0 * program.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    j = tl.where((j + 1) * (j + 2) // 2 <= program, j + 1, j)  # a square root may be off by a rounding
    j = tl.where(j * (j + 1) // 2 > program, j - 1, j)
    return program - j * (j + 1) // 2, j


@triton.jit
def added(total, a, b):
    """total + a b^T, on tensor cores."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), tl.trans(b).to(tl.float32), total)
    else:
        return tl.dot(a, tl.trans(b), total, input_precision="tf32")


@triton.jit
def rows_times_rows(
    a,
    b,
    row,
    column,
    rows,
    columns,
    begin,
    end,
    a_pitch,
    b_pitch,
    DESCRIBED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of the products of rows of a and rows of b from ``begin`` to ``end`` (which BK divides), in float32.

    DESCRIBED: the GPU fetches whole tiles by itself, from descriptors of the matrices. What is computed for rows beyond
    the last means nothing, and is not stored.
    """
    total = tl.zeros((BM, BN), tl.float32)
    tl.assume(end > begin)  # or tensor cores would have to wait for their accumulators
    top, left = row * BM, column * BN
    if DESCRIBED:
        a_tiles = tl.make_tensor_descriptor(a, [rows, a_pitch], [a_pitch, 1], [BM, BK])
        b_tiles = tl.make_tensor_descriptor(b, [columns, b_pitch], [b_pitch, 1], [BN, BK])
        if INTERPRETED:
            while begin < end:
                total = added(total, a_tiles.load([top, begin]), b_tiles.load([left, begin]))
                begin += BK
        else:
            for at in range(begin, end, BK):
                total = added(total, a_tiles.load([top, at]), b_tiles.load([left, at]))
    else:
        k = begin + tl.arange(0, BK)
        a_places = tile_place(a, tl.minimum(top + tl.arange(0, BM), rows - 1), k, a_pitch, True)
        b_places = tile_place(b, tl.minimum(left + tl.arange(0, BN), columns - 1), k, b_pitch, True)
        if INTERPRETED:
            while begin < end:
                total = added(total, tl.load(a_places), tl.load(b_places))
                a_places += BK
                b_places += BK
                begin += BK
        else:
            for _ in range(begin, end, BK):
                total = added(total, tl.load(a_places), tl.load(b_places))
                a_places += BK
                b_places += BK
    return total


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, CUTS: tl.constexpr):
    """x as a product takes it. CUTS: what tensor cores would cut off is rounded to nearest before."""
    if DTYPE == tl.bfloat16 and CUTS:
        return x.to(tl.bfloat16)
    elif DTYPE == tl.float32 and CUTS:
        pattern = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(is_finite(x), pattern.to(tl.float32, bitcast=True), x)
    else:
        return as_stored(x, 0.0, DTYPE, False)


@triton.jit
def store_panel(
    base,
    i,
    j,
    x,
    rows,
    columns,
    pitch,
    DTYPE: tl.constexpr,
    CUTS: tl.constexpr,
):
    """Write a tile into a panel, with zeros behind the last column."""
    x = as_operand(tl.where(j[None, :] < columns, x, 0.0), DTYPE, CUTS)
    pitch = pitch // 64 * 64  # as it is: so the compiler sees that masks hold for whole vectors
    tl.store(tile_place(base, i, j, pitch, True), x, (i[:, None] < rows) & (j[None, :] < pitch))


@triton.jit
def store_both(panel, x, mirrored, i, j, row, column, n, pitch, DTYPE: tl.constexpr, CUTS: tl.constexpr):
    """Write a tile on or above the diagonal of a square panel, and one on the other side, given as its mirror image."""
    store_panel(panel, i, j, x, n, n, pitch, DTYPE, CUTS)
    if row != column:
        store_panel(panel, j, i, tl.trans(mirrored), n, n, pitch, DTYPE, CUTS)


@triton.jit
def square_product(a, b, n, pitch, DESCRIBED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Which rows and columns of a b^T are a program's, both n x n, and that tile of it."""
    row, column = tile_of(tl.program_id(0), tl.cdiv(n, BM), tl.cdiv(n, BN), 8)
    i, j = row * BM + tl.arange(0, BM), column * BN + tl.arange(0, BN)
    return i, j, rows_times_rows(a, b, row, column, n, n, 0, pitch, pitch, pitch, DESCRIBED, BM, BN, BK)


@triton.jit
def load_panel(base, i, j, rows, pitch):
    """A tile of a panel, in float32."""
    pitch = pitch // 64 * 64
    return tl.load(tile_place(base, i, j, pitch, True), (i[:, None] < rows) & (j[None, :] < pitch), other=0.0).to(
        tl.float32
    )
