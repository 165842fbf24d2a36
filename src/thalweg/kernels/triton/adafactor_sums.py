"""Averages of squares of factored tensors, gathered from tiles.

What is added up over tiles is a *statistic*: an array like the state, in as many copies as tiles share an entry. The
first copies of all tensors lie side by side, the others behind them. Once these have been added, the first copies are
the sums, and then the new averages, in the same place. State keeps the old ones until all is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.triton.adafactor_decision import (
    COLUMNS_OF_WHOLE,
    COUNTS,
    EPS,
    ROWS_OF_WHOLE,
    weight_of_squares,
)
from thalweg.kernels.triton.adafactor_tiles import Cut, enumerated
from thalweg.kernels.triton.launching import Compiled
from thalweg.kernels.triton.tables import COLUMNS, STATE, Uploads, step_number

#: Statistics: squares of g by row, by column and by matrix; the old averages of rows by matrix; squares of p.
BY_ROW, BY_COLUMN, BY_MATRIX, OLD, OF_P, KINDS = (tl.constexpr(c) for c in range(6))
# Columns of the table of tensors; from STATISTICS on, four of each statistic: where its first copy is and where the
# others begin, how many entries it has, and in how many copies.
ROWS, BETWEEN, ACROSS, AFTER, STATISTICS = (tl.constexpr(c) for c in range(5))
FIRST, REST, LENGTH, COPIES, FACTS = (tl.constexpr(c) for c in range(5))
TENSOR = tl.constexpr(STATISTICS.value + KINDS.value * FACTS.value)
#: Entries that one program adds up, and how many copies at a time: where these are few, and many.
FEW, ENTRIES_OF_FEW, MANY, ENTRIES_OF_MANY = (tl.constexpr(c) for c in (8, 256, 64, 32))
#: Entries that one program averages.
AVERAGED = 1024


class Statistics:
    """The statistics of some tensors: their memory, and tables of where all is."""

    def __init__(self, cuts: Sequence[Cut], uploads: Uploads) -> None:
        lengths, copies = (numbers([each(own) for own in cuts], KINDS.value) for each in (lengths_of, copies_of))
        sizes = torch.cat([lengths.T.flatten(), (lengths * (copies - 1)).T.flatten()])
        firsts, rests = (torch.cumsum(sizes, 0) - sizes).reshape(2, KINDS.value, -1)
        self.sums = torch.empty(int(sizes.sum()), dtype=torch.float32, device=uploads.device)
        #: By statistic, the first copies of all tensors.
        self.totals = self.sums[: int(lengths.sum())].split(lengths.sum(0).tolist())
        geometry = numbers([own.matrices[1:] for own in cuts], STATISTICS.value)
        facts = torch.stack([firsts.T, rests.T, lengths, copies], 2).flatten(1)
        self.tensors = uploads.table(torch.cat([geometry, facts], 1))
        #: Blocks of entries, of statistics with several copies and of those to be averaged: (statistic, block).
        at_once = torch.where(copies <= FEW.value, ENTRIES_OF_FEW.value, ENTRIES_OF_MANY.value)
        shared = torch.where(copies > 1, -(-lengths // at_once), 0)
        averaged = -(-lengths // AVERAGED)
        averaged[:, OLD.value :] = 0
        self.shared, self.averaged = (uploads.table(enumerated(blocks.flatten())) for blocks in (shared, averaged))

    def add_up(self, compiled: Compiled) -> None:
        """Add all other copies to the first ones."""
        if len(self.shared):
            compiled.run(add_kernel, (len(self.shared),), (self.tensors, self.shared, self.sums), dict, warps=4)

    def average(
        self,
        compiled: Compiled,
        rows: Tensor,
        options: Tensor,
        counts: Tensor,
        flags: Callable[[], dict[str, Any]],
    ) -> None:
        """Make new averages of the sums."""
        if len(self.averaged):
            arguments = rows, options, counts, self.tensors, self.averaged, self.sums
            compiled.run(
                average_kernel, (len(self.averaged),), arguments, lambda: dict(**flags(), BLOCK=AVERAGED), warps=4
            )


def numbers(rows: Sequence[Sequence[int]], columns: int) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, columns)


def lengths_of(own: Cut) -> list[int]:
    before, rows, between, columns, after = own.matrices
    matrices = before * between * after
    return [matrices * rows, matrices * columns, matrices, matrices, 1]


def copies_of(own: Cut) -> list[int]:
    return [own.along, own.down, own.down * own.along, own.down, own.tiles]


# ---- what programs do with them


@triton.jit
def statistic_of(tensor, kind):
    """Where a statistic's facts are in the table of tensors."""
    return tensor + STATISTICS + FACTS * kind


@triton.jit
def copy_of(statistic, copy):
    """Where a copy begins."""
    others = tl.load(statistic + REST) + (copy - 1) * tl.load(statistic + LENGTH)
    return tl.where(copy == 0, tl.load(statistic + FIRST), others)


@triton.jit
def add_block(statistic, block, sums, ENTRIES: tl.constexpr, AT_ONCE: tl.constexpr):
    entry = block.to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[None, :]
    mask = entry < tl.load(statistic + LENGTH)
    copies = tl.load(statistic + COPIES)
    found = tl.zeros((AT_ONCE, ENTRIES), tl.float32)
    first = copies * 0
    while first < copies:
        copy = first + tl.arange(0, AT_ONCE)[:, None]
        found += tl.load(sums + copy_of(statistic, copy) + entry, mask & (copy < copies), other=0.0)
        first += AT_ONCE
    tl.store(sums + tl.load(statistic + FIRST) + entry, tl.sum(found, 0)[None, :], mask)


@triton.jit
def add_kernel(tensors, blocks, sums):
    """Add the copies of some entries of a statistic, in an order that is always the same."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    statistic = statistic_of(tensors + (which // KINDS).to(tl.int64) * TENSOR, which % KINDS)
    if tl.load(statistic + COPIES) <= FEW:
        add_block(statistic, block, sums, ENTRIES_OF_FEW, FEW)
    else:
        add_block(statistic, block, sums, ENTRIES_OF_MANY, MANY)


@triton.jit
def average_kernel(
    rows,
    numbers,
    counts,
    tensors,
    blocks,
    sums,
    CLAMP: tl.constexpr,
    R_DTYPE: tl.constexpr,
    C_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New averages of squares of some rows, of some columns or of some whole matrices, from their sums."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // KINDS).to(tl.int64), which % KINDS
    tensor = tensors + row * TENSOR
    statistic = statistic_of(tensor, kind)
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(statistic + LENGTH)
    height = tl.load(counts + COUNTS * row + ROWS_OF_WHOLE)
    width = tl.load(counts + COUNTS * row + COLUMNS_OF_WHOLE)
    if kind == BY_ROW:
        added = width
        state = tl.load(rows + row * COLUMNS + STATE).to(tl.pointer_type(R_DTYPE))
        old = tl.load(state + entry, mask, other=0.0).to(tl.float32)
    elif kind == BY_COLUMN:
        added = height
        state = tl.load(rows + row * COLUMNS + STATE + 1).to(tl.pointer_type(C_DTYPE))
        old = tl.load(state + entry, mask, other=0.0).to(tl.float32)
    else:  # the average of the new averages of rows, which follows from the same sums
        added = height * width
        old = tl.load(sums + tl.load(statistic_of(tensor, OLD) + FIRST) + entry, mask, other=0.0) / height
    place = sums + tl.load(statistic + FIRST) + entry
    square = tl.load(place, mask, other=0.0) / added
    if not CLAMP:
        square = square + tl.load(numbers + EPS)
    weight = weight_of_squares(step_number(rows, row), numbers)
    tl.store(place, (1.0 - weight) * old + weight * square, mask)
