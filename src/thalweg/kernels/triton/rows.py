"""Rows of tables on a device: what they say of a tensor, and how kernels read them.

A *row* is one tensor, or one slice of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from thalweg.boundary import ROUNDING_STREAM, state_streams
from thalweg.kernels.triton.admission import ROOM
from thalweg.kernels.triton.numbers import random_bits, random_bits_behind, widened
from thalweg.rules.noise import stream_key, tensor_id

#: A tensor of the framework that owns the memory.
Tensor = Any

# Columns of the table of rows. There are keys of random bits, and scales of codes, for the parameter and each entry.
P, STATE, RECORD, SIZE, POSITION, WIDTH, WHOLE_WIDTH, STEP, KEYS, SCALES, COLUMNS = (
    tl.constexpr(c) for c in (0, 1, *range(1 + ROOM, 8 + ROOM), 8 + 2 * ROOM, 9 + 3 * ROOM)
)


class Operand(NamedTuple):
    """One parameter: its memory, and where its elements are in the whole, if this is a part of it."""

    name: str
    p: Tensor
    #: In the order of the kernels; None: there is none.
    entries: tuple[Tensor | None, ...]
    step: Tensor
    #: Of the parameter and of each entry, where they are codes.
    scales: tuple[Tensor | None, ...] = ()
    #: Of what rounding has cost the parameter.
    record: Tensor | None = None
    #: Of the first element in the whole parameter.
    position: int = 0
    #: Elements that follow each other here, and how far on the next run of them is in the whole; 0: all do.
    width: int = 0
    whole_width: int = 0
    #: Of the whole parameter; None: this is it.
    shape: tuple[int, ...] | None = None


def rows_of(operand: Operand, keys: Sequence[str], stacked_axes: int, seed: int) -> list[list[int]]:
    """The rows of one operand: one for each stacked slice, which are tensors by themselves. keys: of its entries."""
    p = operand.p
    size = math.prod(p.shape[stacked_axes:])
    slices = math.prod(p.shape[:stacked_axes])
    drawn = state_streams(keys)
    streams = [ROUNDING_STREAM, *(drawn[key][0] for key in keys)]
    bits = [stream_key(seed, tensor_id(operand.name), stream) for stream in streams]

    def address(tensor: Tensor | None, index: int) -> int:
        if tensor is None or not slices:
            return 0
        return int(tensor.data_ptr() + index * (tensor.numel() // slices) * tensor.element_size())

    nothing = (None,) * (1 + ROOM)
    tensors = (p, *(*operand.entries, *nothing)[:ROOM], operand.record)
    scales = (*operand.scales, *nothing)[: 1 + ROOM]
    return [
        [
            *(address(tensor, i) for tensor in tensors),
            size,
            operand.position + i * size,
            operand.width or size or 1,
            operand.whole_width or size or 1,
            operand.step.data_ptr(),
            *(*bits, *[0] * ROOM)[: 1 + ROOM],
            *(address(tensor, i) for tensor in scales),
        ]
        for i in range(slices)
    ]


# ---- what programs do with tables


@triton.jit
def address(rows, row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a row's parameter or one of its state entries lies."""
    return pointer(tl.load(rows + row * COLUMNS + column), DTYPE, ALIGNED)


@triton.jit
def pointer(number, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    place = number.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def loaded(place, mask):
    """Numbers in memory as float32; 0 where the mask says that there are none."""
    if mask is None:
        return widened(tl.load(place))
    else:
        return tl.load(place, mask, other=0.0).to(tl.float32)


@triton.jit
def positions(rows, row, index, SPREAD: tl.constexpr):
    """Where elements of a row are in the whole parameter, for random bits. SPREAD: not all follow each other there."""
    first = tl.load(rows + row * COLUMNS + POSITION)
    if SPREAD:
        width = tl.load(rows + row * COLUMNS + WIDTH)
        return first + (index // width) * tl.load(rows + row * COLUMNS + WHOLE_WIDTH) + index % width
    else:
        return first + index


@triton.jit
def step_number(rows, row):
    """The number of this step, from 1, as float32: the state has that of the last one."""
    return tl.load(tl.load(rows + row * COLUMNS + STEP).to(tl.pointer_type(tl.float32))) + 1.0


@triton.jit
def number_kept(rows, row, which):
    """An entry of the state that is one number for each tensor."""
    return tl.load(place_of_number(rows, row, which))


@triton.jit
def place_of_number(rows, row, which):
    return tl.load(rows + row * COLUMNS + STATE + which).to(tl.pointer_type(tl.float32))


@triton.jit
def draws_of(rows, row, which: tl.constexpr, first, index, t, SPREAD: tl.constexpr):
    """32 random bits for elements, index behind the first: those of a parameter (0), or of an entry, at step t."""
    key, t = tl.load(rows + row * COLUMNS + KEYS + which).to(tl.uint32), t.to(tl.uint32)
    if SPREAD or index.dtype != tl.int32:
        return random_bits(key, t, positions(rows, row, first + index, SPREAD))
    else:
        return random_bits_behind(key, t, tl.load(rows + row * COLUMNS + POSITION) + first, index)
