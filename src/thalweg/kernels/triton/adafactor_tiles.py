"""Matrices cut into tiles: who works on what, and where sums of rows and columns are gathered.

A factored tensor is seen as (before, rows, between, columns, after): one *matrix* of rows x columns for each place along
the other axes. A *tile* is some rows and some columns of one matrix, or of several that lie side by side, where there are
axes behind the columns. One program goes through the rows of a tile, a few at a time.

What is added up over tiles is a *statistic*: an array like the state, in as many copies as tiles share an entry. The
first copies of all tensors lie side by side, the others behind them: once these have been added, the first are the sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.cpu.plan import seen_as
from thalweg.kernels.triton.tables import Uploads

#: Elements that a program has in hand at once, and the warps it has. Measured on an H200.
BLOCK, DEEP_BLOCK, LAUNCH = 4096, 2048, dict(num_warps=4)
#: Blocks that a program goes through, one after the other. The fewer, the more programs share the work, but the more
#: copies of sums there are. Small models have tiles for so many programs; in large ones, copies take less than 1/200 of
#: the memory of the parameters.
FEWEST_BLOCKS, MOST_BLOCKS, PROGRAMS = 8, 128, 512
#: How many columns a block may have; behind each, so many places at most.
WIDTHS, DEEP_WIDTH, DEEPEST = (1024, 512, 256), 128, 32
#: What share of the lanes of programs may be idle where matrices are narrower than blocks.
IDLE = 0.3

#: Statistics: squares of g by row, by column and by matrix, and the old averages of rows by matrix.
BY_ROW, BY_COLUMN, BY_MATRIX, OLD, KINDS = (tl.constexpr(c) for c in range(5))
# Columns of the table of tensors; from STATISTICS on, four of each statistic.
ROWS, BETWEEN, ACROSS, AFTER, HEIGHT, STATISTICS = (tl.constexpr(c) for c in range(6))
FIRST, REST, LENGTH, COPIES, FACTS = (tl.constexpr(c) for c in range(5))
FIELDS = tl.constexpr(STATISTICS.value + KINDS.value * FACTS.value)
# Columns of the table of tiles: whose it is, where its partial sum goes, and where it lies.
OWNER, INDEX, MATRIX, DOWN, ALONG, BEHIND, TILE_FIELDS = (tl.constexpr(c) for c in range(7))
#: Entries of statistics that one program adds up, and how many copies at a time: where these are few, and many.
FEW, ENTRIES_OF_FEW, MANY, ENTRIES_OF_MANY = (tl.constexpr(c) for c in (8, 256, 64, 32))
#: Entries of statistics that one program averages.
ENTRIES = 1024


class Form(NamedTuple):
    """The form of blocks: how many columns they have, and how many places behind each."""

    width: int
    depth: int = 1

    @property
    def lines(self) -> int:
        """How many rows they have."""
        return (BLOCK if self.depth == 1 else DEEP_BLOCK) // (self.width * self.depth)


class Matrices(NamedTuple):
    """A tensor as the kernels see it."""

    before: int
    rows: int
    between: int
    columns: int
    after: int

    def lengths(self) -> list[int]:
        """Of each statistic."""
        matrices = self.before * self.between * self.after
        return [matrices * self.rows, matrices * self.columns, matrices, matrices]

    def lanes(self, form: Form) -> int:
        """How many elements there would be if all blocks of this form were full."""
        wide = cuts(self.columns, form.width) * form.width * cuts(self.after, form.depth) * form.depth
        return self.before * self.between * self.rows * wide


class Cut(NamedTuple):
    """How matrices are cut into tiles: of which form their blocks are, and how many rows the tiles have."""

    matrices: Matrices
    form: Form
    height: int

    def copies(self) -> list[int]:
        """Of each statistic."""
        down, along = cuts(self.matrices.rows, self.height), cuts(self.matrices.columns, self.form.width)
        return [along, down, down * along, down]

    def behind(self) -> int:
        """How many tiles lie side by side behind the same columns."""
        return -(-self.matrices.after // self.form.depth)


def cut(seen: Sequence[Matrices]) -> list[Cut]:
    """The tiles of some tensors, of about the same size for all."""
    width = width_for([own for own in seen if own.after == 1])
    forms = [Form(width) if own.after == 1 else deep_form(own.after) for own in seen]
    blocks = sum(own.lanes(form) for own, form in zip(seen, forms, strict=True)) // BLOCK
    by_program = min(MOST_BLOCKS, max(FEWEST_BLOCKS, blocks // PROGRAMS))
    return [
        Cut(own, form, evened(own.rows, by_program * form.lines, form.lines))
        for own, form in zip(seen, forms, strict=True)
    ]


def width_for(seen: Sequence[Matrices]) -> int:
    """The width of blocks that serve matrices with nothing behind their columns: wide, but not with many idle lanes."""
    elements = sum(map(math.prod, seen))
    full_enough = (w for w in WIDTHS if elements >= (1 - IDLE) * sum(own.lanes(Form(w)) for own in seen))
    return next(full_enough, WIDTHS[-1])


def deep_form(after: int) -> Form:
    depth = min(triton.next_power_of_2(after), DEEPEST)
    return Form(min(DEEP_WIDTH, DEEP_BLOCK // depth), depth)


def evened(rows: int, most: int, lines: int) -> int:
    """The height of tiles of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (cuts(rows, most) * lines))) * lines


def cuts(size: int, most: int) -> int:
    """Into how many pieces of at most so many. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))


class Tiles:
    """The tiles of some tensors, in tables on the device, and the memory of their statistics."""

    def __init__(self, shapes: Sequence[Shape], axes: tuple[int, int], uploads: Uploads) -> None:
        """shapes: of each row of the tables, which are all factored over the same axes."""
        cuts_of = cut([Matrices(*seen_as(shape, *axes)) for shape in shapes])
        #: What divides the lengths of all rows whose elements follow each other.
        self.divisor = math.gcd(*(own.matrices.columns for own in cuts_of if own.matrices.after == 1))
        #: Whether all places in a block can be told apart by 32 bits.
        self.long = any(own.form.lines * math.prod(own.matrices[2:]) >= 2**31 for own in cuts_of)
        lengths = table([own.matrices.lengths() for own in cuts_of])
        copies = table([own.copies() for own in cuts_of])
        # the first copies of all, one statistic after the other; then all that remains
        sizes = lengths.T.flatten(), (lengths * (copies - 1)).T.flatten()
        ends = torch.cumsum(torch.cat(sizes), 0)
        firsts, rests = (ends - torch.cat(sizes)).reshape(2, KINDS.value, -1)
        #: By statistic, the sums of all tensors, once copies have been added.
        self.sums = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.float32, device=uploads.device)
        self.totals = self.sums[: int(lengths.sum())].split(lengths.sum(0).tolist())
        geometry = table([[*own.matrices[1:], own.height] for own in cuts_of], 5)
        facts = torch.stack([firsts.T, rests.T, lengths, copies], 2).flatten(1)
        self.matrices = uploads.table(torch.cat([geometry, facts], 1))
        tiles = tiles_of(cuts_of, copies)
        self.count = len(tiles)
        self.begins = uploads.table(begins_of(tiles[:, OWNER.value], len(cuts_of)))
        forms = list(dict.fromkeys(own.form for own in cuts_of))
        kinds = torch.tensor([forms.index(own.form) for own in cuts_of])[tiles[:, OWNER.value].long()]
        #: By form, a table of its tiles.
        self.by_form = {form: uploads.table(tiles[kinds == kind]) for kind, form in enumerate(forms)}
        #: Blocks of entries of statistics, those with several copies and those to be averaged: (statistic, block).
        at_once = torch.where(copies <= FEW.value, ENTRIES_OF_FEW.value, ENTRIES_OF_MANY.value)
        shared = torch.where(copies > 1, -(-lengths // at_once), 0).flatten()
        every = -(-lengths // ENTRIES)
        every[:, OLD.value] = 0
        self.shared, self.every = uploads.table(pieces_of(shared)), uploads.table(pieces_of(every.flatten()))

    def add_up(self) -> None:
        """Add all other copies of the statistics to the first ones."""
        if len(self.shared):
            add_kernel[(len(self.shared),)](self.matrices, self.shared, self.sums, num_warps=4)


def table(rows: Sequence[Sequence[int]], columns: int = KINDS.value) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, columns)


def pieces_of(counts: Tensor) -> Tensor:
    """(owner, piece) for each of so many pieces of each owner."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    pieces = torch.arange(len(owners)) - (torch.cumsum(counts, 0) - counts)[owners]
    return torch.stack([owners, pieces], 1).to(torch.int32).contiguous()


def begins_of(owners: Tensor, count: int) -> Tensor:
    """Where the pieces of each owner begin in the list of all, with the end of the last behind them."""
    return torch.searchsorted(owners.contiguous(), torch.arange(count + 1, dtype=owners.dtype)).to(torch.int32)


def tiles_of(cuts_of: Sequence[Cut], copies: Tensor) -> Tensor:
    """The table of tiles. Those of one matrix follow each other, line by line."""
    slices = torch.tensor([own.matrices.before * own.matrices.between for own in cuts_of], dtype=torch.int64)
    sides = torch.tensor([own.behind() for own in cuts_of], dtype=torch.int64)
    along, down = copies[:, BY_ROW.value], copies[:, BY_COLUMN.value]
    owners, rest = pieces_of(slices * sides * along * down).long().unbind(1)
    places = []
    for counts in (sides, along, down):
        places.append(rest % counts[owners])
        rest = rest // counts[owners]
    behind, column, line = places
    return torch.stack([owners, torch.arange(len(owners)), rest, line, column, behind], 1).to(torch.int32).contiguous()


# ---- what programs do with them


@triton.jit
def places_of(statistic, copy, entry):
    """Where entries of one copy of a statistic are."""
    others = tl.load(statistic + REST) + (copy - 1) * tl.load(statistic + LENGTH)
    return tl.where(copy == 0, tl.load(statistic + FIRST), others) + entry


@triton.jit
def add_block(statistic, block, sums, ENTRIES: tl.constexpr, AT_ONCE: tl.constexpr):
    entry = block.to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)[None, :]
    mask = entry < tl.load(statistic + LENGTH)
    copies = tl.load(statistic + COPIES)
    found = tl.zeros((AT_ONCE, ENTRIES), tl.float32)
    first = copies * 0
    while first < copies:
        copy = first + tl.arange(0, AT_ONCE)[:, None]
        found += tl.load(sums + places_of(statistic, copy, entry), mask & (copy < copies), other=0.0)
        first += AT_ONCE
    tl.store(sums + tl.load(statistic + FIRST) + entry, tl.sum(found, 0)[None, :], mask)


@triton.jit
def add_kernel(matrices, blocks, sums):
    """Add the copies of some entries of a statistic, in an order that is always the same."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    statistic = matrices + (which // KINDS).to(tl.int64) * FIELDS + STATISTICS + FACTS * (which % KINDS)
    if tl.load(statistic + COPIES) <= FEW:
        add_block(statistic, block, sums, ENTRIES_OF_FEW, FEW)
    else:
        add_block(statistic, block, sums, ENTRIES_OF_MANY, MANY)
