"""Sums over rows, columns and matrices, gathered from tiles, and what is kept of them from pass to pass.

A *statistic* is an array of one number for each row, column, matrix or tensor, in as many copies as tiles share an
entry. The first copies of all tensors lie side by side, the others behind them. Once these have been added, the first
copies are the sums. What is computed of sums between passes and read by later ones is a statistic in one copy.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from thalweg.kernels.triton.cuts import Cut
from thalweg.kernels.triton.tables import enumerate_pieces
from thalweg.kernels.triton.tiles import ACROSS, AFTER, BETWEEN, GEOMETRY, ROWS
from thalweg.programs.extents import COLUMN, ELEMENT, MATRIX, ROW, SMALL, TENSOR

#: Behind the geometry of a tensor, of each statistic: where its first copy is and where the others begin, how many
#: entries it has, and in how many copies.
FIRST, REST, LENGTH, COPIES, FACTS = (tl.constexpr(c) for c in range(5))
#: Entries that one program adds up, and how many copies at a time: where these are few, and many.
FEW, ENTRIES_OF_FEW, MANY, ENTRIES_OF_MANY = (tl.constexpr(c) for c in (8, 256, 64, 32))
#: Entries for which one program computes between passes.
COMPUTED = 256
#: Of how many kinds blocks of entries may be.
KINDS = tl.constexpr(len(SMALL))


class Statistic(NamedTuple):
    """What there is one number for (a row, column, matrix, tensor), of what it is the sum, and by which pass."""

    kind: str
    #: The kind of what is summed; "": nothing is, it is computed between passes.
    of: str = ""
    made_by: int = -1


class Statistics:
    """The statistics of some tensors: their memory, and tables of where all is."""

    def __init__(self, statistics: Sequence[Statistic], cuts: Sequence[Cut], uploads: Any) -> None:
        self.statistics, self.uploads = statistics, uploads
        lengths = [[length_of(cut, statistic) for statistic in statistics] for cut in cuts]
        copies = [[copies_of(cut, statistic) for statistic in statistics] for cut in cuts]
        # by statistic, then by tensor: all first copies, then all others
        first = [row[i] for i in range(len(statistics)) for row in lengths]
        rest = [
            row[i] * (copy[i] - 1) for i in range(len(statistics)) for row, copy in zip(lengths, copies, strict=True)
        ]
        starts = list(itertools.accumulate([*first, *rest], initial=0))
        self.sums = uploads.empty((starts[-1],))
        #: By statistic, the first copies of all tensors.
        ends = [starts[i * len(cuts)] for i in range(len(statistics) + 1)]
        self.totals = [self.sums[begin:end] for begin, end in itertools.pairwise(ends)]
        table = array("q")
        for place, cut in enumerate(cuts):
            table.extend((*cut.matrices[1:], cut.along, *cut.matrices.entries))
            for i in range(len(statistics)):
                begins = starts[i * len(cuts) + place], starts[(len(statistics) + i) * len(cuts) + place]
                table.extend((*begins, lengths[place][i], copies[place][i]))
        self.tensors = uploads.table(table, GEOMETRY.value + FACTS.value * len(statistics))
        #: By pass: blocks of entries of statistics with several copies, (tensor and statistic, block).
        self.shared = {}
        for number in {statistic.made_by for statistic in statistics if statistic.made_by >= 0}:
            blocks = []
            for row, counts in zip(lengths, copies, strict=True):
                for statistic, length, count in zip(statistics, row, counts, strict=True):
                    is_shared = statistic.made_by == number and count > 1
                    blocks.append(blocks_of(length, count) if is_shared else 0)
            self.shared[number] = uploads.table(enumerate_pieces(blocks), 2)
        self.entries = [cut.matrices.entries for cut in cuts]

    def blocks(self, kinds: Sequence[str]) -> Any:
        """Blocks of entries of these kinds, of all tensors: (tensor and kind, block)."""
        counts = [
            -(-entries // COMPUTED) if kind in kinds else 0
            for counted in self.entries
            for kind, entries in zip(SMALL, counted, strict=True)
        ]
        return self.uploads.table(enumerate_pieces(counts), 2)

    def add_up(self, compiled: Any, number: int) -> None:
        """Add to the first copies of what a pass has made all others."""
        blocks = self.shared[number]
        if len(blocks):
            count = len(self.statistics)
            arguments = self.tensors, blocks, self.sums
            compiled.run(add_kernel, (len(blocks),), arguments, lambda: dict(STATISTICS=count), warps=4)


def blocks_of(length: int, copies: int) -> int:
    """How many programs add up the copies of a statistic."""
    at_once: int = ENTRIES_OF_FEW.value if copies <= FEW.value else ENTRIES_OF_MANY.value
    return -(-length // at_once)


def length_of(cut: Cut, statistic: Statistic) -> int:
    return dict(zip(SMALL, cut.matrices.entries, strict=True)).get(statistic.kind, 1)


def copies_of(cut: Cut, statistic: Statistic) -> int:
    """How many tiles have a part of the same sum."""
    if not statistic.of:
        return 1
    if statistic.kind == TENSOR:
        return cut.tiles
    return {
        (ELEMENT, ROW): cut.along,
        (ELEMENT, COLUMN): cut.down,
        (ELEMENT, MATRIX): cut.down * cut.along,
        (ROW, MATRIX): cut.down,
        (COLUMN, MATRIX): cut.along,
    }[statistic.of, statistic.kind]


# ---- what programs do with them


@triton.jit
def statistic_of(tensor, index):
    """Where a statistic's facts are in the table of tensors."""
    return tensor + GEOMETRY + FACTS * index


@triton.jit
def first_of(tensor, index, mask=None):
    """Where a statistic's first copy begins."""
    return tl.load(statistic_of(tensor, index) + FIRST, mask)


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
    total = tl.zeros((AT_ONCE, ENTRIES), tl.float32)
    first = copies * 0
    while first < copies:
        copy = first + tl.arange(0, AT_ONCE)[:, None]
        total += tl.load(sums + copy_of(statistic, copy) + entry, mask & (copy < copies), other=0.0)
        first += AT_ONCE
    tl.store(sums + tl.load(statistic + FIRST) + entry, tl.sum(total, 0)[None, :], mask)


@triton.jit
def add_kernel(tensors, blocks, sums, STATISTICS: tl.constexpr):
    """Add the copies of some entries of a statistic, in an order that is always the same."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    tensor = tensors + (which // STATISTICS).to(tl.int64) * (GEOMETRY + FACTS * STATISTICS)
    statistic = statistic_of(tensor, which % STATISTICS)
    if tl.load(statistic + COPIES) <= FEW:
        add_block(statistic, block, sums, ENTRIES_OF_FEW, FEW)
    else:
        add_block(statistic, block, sums, ENTRIES_OF_MANY, MANY)


@triton.jit
def matrix_of_row(tensor, entry):
    """To which matrix an entry for a row belongs."""
    inner = tl.load(tensor + BETWEEN) * tl.load(tensor + AFTER)
    return (entry // (tl.load(tensor + ROWS) * inner)) * inner + entry % inner


@triton.jit
def matrix_of_column(tensor, entry):
    after = tl.load(tensor + AFTER)
    return (entry // (tl.load(tensor + ACROSS) * after)) * after + entry % after
