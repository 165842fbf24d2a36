"""Sums that passes make, for each row, column, matrix or tensor, and what is kept of them from pass to pass.

A *statistic* is an array of one number for each row, column, matrix or tensor. Where several pieces have a part of the
same entry, each leaves a copy, and one launch adds up all copies of a pass. What is computed of sums between passes for
rows, columns and matrices, and read by later passes, is a statistic that nothing is added up for.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from thalweg.kernels.triton.blocks import GEOMETRY, Cut, Grid, enumerate_pieces
from thalweg.programs.extents import COLUMN, ELEMENT, MATRIX, ROW, SMALL, TENSOR

#: Of what there are statistics, in the order in which the table of tensors has how many there are.
KINDS = (*SMALL, TENSOR)
#: Behind the geometry of a tensor, of each statistic: where it is, where its copies begin, how many entries it has, and
#: in how many copies.
TOTAL, FIRST, LENGTH, COPIES, FACTS = (tl.constexpr(c) for c in range(5))
#: Copies up to which there are few, and entries that one program adds up of few, of many, and of a single number; and
#: how many copies it adds at a time.
FEW, ENTRIES_OF_FEW, MANY, ENTRIES_OF_MANY, OF_ONE = (tl.constexpr(c) for c in (8, 256, 64, 32, 1024))
#: Entries for which one program computes between passes.
COMPUTED = 256


class Statistic(NamedTuple):
    """What there is one number for (a row, column, matrix, tensor), of what it is the sum, and by which pass."""

    kind: str
    #: The kind of what is summed; "": nothing is, it is computed between passes.
    of: str = ""
    made_by: int = -1


class Sums:
    """The statistics of some tensors: their memory, and the table of tensors with where all is."""

    def __init__(
        self, statistics: Sequence[Statistic], grids: Mapping[int, Grid], cuts: Sequence[Sequence[Cut]], uploads: Any
    ) -> None:
        """grids: what passes go through, by number. cuts: of each tensor, where lines are summed, and where not."""
        self.statistics, self.uploads = statistics, uploads
        self.entries = [measured.matrices.entries for measured, _ in cuts]
        lengths = [[entries[KINDS.index(statistic.kind)] for statistic in statistics] for entries in self.entries]
        copies = [[copies_of(measured, statistic) for statistic in statistics] for measured, _ in cuts]
        # first all statistics, then parts of tensors' sums, which passes make in turn, then all other copies
        sizes = [sum(row[i] for row in lengths) for i in range(len(statistics))]
        starts = list(itertools.accumulate(sizes, initial=0))
        parts, most = dict[int, int](), 0
        for i, statistic in enumerate(statistics):
            if statistic.kind == TENSOR:
                before = sum(other.kind == TENSOR and other.made_by == statistic.made_by for other in statistics[:i])
                parts[i] = starts[-1] + before * grids[statistic.made_by].count
                most = max(most, (before + 1) * grids[statistic.made_by].count)
        free = starts[-1] + most
        totals, table = starts[:-1], array("q")
        blocks: dict[int, list[int]] = {number: [] for number in grids}
        for row, (measured, stepped) in enumerate(cuts):
            table.extend((*measured.matrices[1:], *self.entries[row], *measured.facts, *stepped.facts))
            for i, statistic in enumerate(statistics):
                length, count, first = lengths[row][i], copies[row][i], totals[i]
                if i in parts:
                    begins = grids[statistic.made_by].begins
                    first, count = parts[i] + begins[row], begins[row + 1] - begins[row]
                elif count > 1:
                    first, free = free, free + count * length
                table.extend((totals[i], first, length, count))
                if first != totals[i]:
                    blocks[statistic.made_by] += [0] * (row * len(statistics) + i - len(blocks[statistic.made_by]))
                    blocks[statistic.made_by].append(blocks_of(length, count))
                totals[i] += length
        self.memory = uploads.empty((max(1, free),))
        #: Where passes leave their parts of tensors' sums.
        self.partials = self.memory[starts[-1] :]
        self.totals = [self.memory[begin:end] for begin, end in itertools.pairwise(starts)]
        self.tensors = uploads.table(table, GEOMETRY.value + FACTS.value * len(statistics))
        #: By pass: blocks of entries of statistics with copies, (tensor and statistic, block).
        self.shared = {number: uploads.table(enumerate_pieces(counts), 2) for number, counts in blocks.items()}

    def blocks(self, kinds: Sequence[str]) -> Any:
        """Blocks of entries of these kinds, of all tensors: (tensor and kind, block)."""
        counts = [
            -(-entries // COMPUTED) if kind in kinds else 0
            for counted in self.entries
            for kind, entries in zip(KINDS, counted, strict=True)
        ]
        return self.uploads.table(enumerate_pieces(counts), 2)

    def add_up(self, compiled: Any, number: int) -> None:
        """Add up the copies of all that a pass has made."""
        blocks = self.shared[number]
        if len(blocks):
            count = len(self.statistics)
            arguments = self.tensors, blocks, self.memory
            compiled.run(add_kernel, (len(blocks),), arguments, lambda: dict(STATISTICS=count), warps=4)


def blocks_of(length: int, copies: int) -> int:
    """How many programs add up the copies of a statistic."""
    at_once: int = ENTRIES_OF_FEW.value if copies <= FEW.value else ENTRIES_OF_MANY.value
    return -(-length // at_once)


def copies_of(cut: Cut, statistic: Statistic) -> int:
    """How many pieces have a part of the same sum, unless it is a tensor's."""
    return {
        (ELEMENT, ROW): cut.along,
        (ELEMENT, COLUMN): cut.down,
        (ELEMENT, MATRIX): cut.down * cut.along,
        (ROW, MATRIX): cut.down,
        (COLUMN, MATRIX): cut.along,
    }.get((statistic.of, statistic.kind), 1)


# ---- what programs do with them


@triton.jit
def statistic_of(tensor, index):
    """Where a statistic's facts are in the table of tensors."""
    return tensor + GEOMETRY + FACTS * index


@triton.jit
def first_of(tensor, index):
    """Where a statistic begins."""
    return tl.load(statistic_of(tensor, index) + TOTAL)


@triton.jit
def copy_of(statistic, copy):
    """Where a copy begins."""
    return tl.load(statistic + FIRST) + copy * tl.load(statistic + LENGTH)


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
    tl.store(sums + tl.load(statistic + TOTAL) + entry, tl.sum(total, 0)[None, :], mask)


@triton.jit
def add_kernel(tensors, blocks, sums, STATISTICS: tl.constexpr):
    """Add the copies of some entries of a statistic, in an order that is always the same."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    tensor = tensors + (which // STATISTICS).to(tl.int64) * (GEOMETRY + FACTS * STATISTICS)
    statistic = statistic_of(tensor, which % STATISTICS)
    if tl.load(statistic + LENGTH) == 1:
        add_block(statistic, block, sums, 1, OF_ONE)
    elif tl.load(statistic + COPIES) <= FEW:
        add_block(statistic, block, sums, ENTRIES_OF_FEW, FEW)
    else:
        add_block(statistic, block, sums, ENTRIES_OF_MANY, MANY)
