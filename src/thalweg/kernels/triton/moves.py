"""Copies of many arrays on a device, in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.rows import pointer
from thalweg.kernels.triton.xla import WARP, Launched

#: Elements that a program copies at once, and the programs that take turns with each copy.
BLOCK, TURNS, WARPS = 2048, 32, 4
#: By bytes: what Triton calls such numbers.
TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def move(source, target, count, TYPE: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """WIDE: what the count is a multiple of; above 1 both places are multiples of 16."""
    source, target = pointer(source, TYPE, WIDE > 1), pointer(target, TYPE, WIDE > 1)
    count = count // WIDE * WIDE
    for first in range(tl.program_id(1) * BLOCK, count, TURNS * BLOCK):
        index = first + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source + index, index < count), index < count)


@triton.jit
def moves_kernel(table, TYPE: tl.constexpr, WIDE: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr):
    """table: of each copy its source and target, and how many elements are copied."""
    entry = table + 3 * tl.program_id(0)
    source, target, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    if (source % 16 == 0) & (target % 16 == 0) & (count % WIDE == 0):
        move(source, target, count, TYPE, WIDE, TURNS, BLOCK)
    else:
        move(source, target, count, TYPE, 1, TURNS, BLOCK)


def launch_moves(compiled: Callable[..., Any], count: int, width: int, table: int) -> Launched:
    """width: bytes of an element. table: the buffer with the table."""
    constants = dict(TYPE=TYPES[width], WIDE=16 // width, TURNS=TURNS, BLOCK=BLOCK)
    kernel = compiled(moves_kernel, {"table": ("*i64", True)}, constants, WARPS)
    return Launched(kernel, WARP * WARPS, (count, TURNS, 1), [(table, 0)])
