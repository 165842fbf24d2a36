"""Factored tensors cut into tiles: who works on what, and where sums of rows and columns are gathered.

A factored tensor is seen as (before, rows, between, columns, after): one *matrix* of rows x columns for each place
along the other axes. A *tile* is some rows and columns of one matrix, or of several that lie side by side, where there
are axes behind the columns. One program goes through the rows of a tile, a *block* of a few of them at a time.
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

#: Elements of a block, and warps of the program that has it in hand. Between those that were best on an H200.
BLOCK, WARPS = 2048, 4
#: How many columns a block may have; with places behind each column, and how many of these at most.
WIDTHS, DEEP_WIDTH, DEEPEST = (1024, 512, 256), 64, 32
# Columns of the table of tiles: whose it is, its place among its owner's and among all, which matrix of its owner,
# where it lies there, and its rows.
OWNER, PIECE, INDEX, MATRIX, DOWN, ALONG, BEHIND, FIRST_ROW, END_ROW, TILE = (tl.constexpr(c) for c in range(10))


class Form(NamedTuple):
    """The form of blocks: how many columns they have, and how many places behind each."""

    width: int
    depth: int = 1
    #: Whether elements of several matrices alternate along a row.
    mixed: bool = False

    @property
    def lines(self) -> int:
        """How many rows they have."""
        return BLOCK // (self.width * self.depth)


class Matrices(NamedTuple):
    """A tensor as the kernels see it."""

    before: int
    rows: int
    between: int
    columns: int
    after: int

    def lanes(self, form: Form) -> int:
        """How many elements there would be if all blocks of this form were full."""
        wide = pieces(self.columns, form.width) * form.width * pieces(self.after, form.depth) * form.depth
        return self.before * self.between * self.rows * wide

    def side_by_side(self) -> Matrices:
        """The same memory, what lies behind columns taken for columns. At least one: averages of rows need a place."""
        return self._replace(columns=max(1, self.columns) * self.after, after=1)


def matrices_of(shape: Shape, row: int, column: int) -> Matrices:
    """How a tensor is seen that is factored over these axes. If it has no matrix, as one without rows and columns:
    its sums are 0, and somebody has to say so.
    """
    seen = Matrices(*seen_as(shape, row, column))
    return seen if seen.before * seen.between * seen.after else Matrices(1, 0, 1, 0, 1)


class Cut(NamedTuple):
    """How a tensor is cut into tiles: of which form their blocks are, and how many rows they have."""

    matrices: Matrices
    form: Form
    height: int

    @property
    def down(self) -> int:
        return pieces(self.matrices.rows, self.height)

    @property
    def along(self) -> int:
        return pieces(self.matrices.columns, self.form.width)

    @property
    def behind(self) -> int:
        """How many tiles share the same rows and columns."""
        return -(-self.matrices.after // self.form.depth)

    @property
    def tiles(self) -> int:
        matrices = self.matrices.before * self.matrices.between
        return matrices * self.behind * self.along * self.down


class Limits(NamedTuple):
    """How many programs a launch should have, and how many blocks each may go through."""

    programs: int
    fewest_blocks: int
    most_blocks: int
    #: What share of their lanes may be idle where rows are shorter than blocks.
    idle: float


#: Programs that measure keep sums of rows and columns: the fewer there are, the less memory these take. In large models
#: it is less than 1/200 of what the parameters take. Programs that step keep nothing.
MEASURING, STEPPING = Limits(448, 8, 256, 0.3), Limits(2048, 8, 32, 0.1)


def cut_to_measure(seen: Sequence[Matrices]) -> list[Cut]:
    """Into tiles that tell matrices apart: each has its own sums of rows."""
    width = width_for([own for own in seen if own.after == 1], MEASURING)
    return cut(seen, [Form(width) if own.after == 1 else deep_form(own.after) for own in seen], MEASURING)


def cut_to_step(seen: Sequence[Matrices]) -> list[Cut]:
    """Into tiles of consecutive elements, of whichever matrix."""
    flat = [own.side_by_side() for own in seen]
    width = width_for(flat, STEPPING)
    return cut(flat, [Form(width, mixed=own.after > 1) for own in seen], STEPPING)


def cut(seen: Sequence[Matrices], forms: Sequence[Form], limits: Limits) -> list[Cut]:
    """Into tiles that are about equal, among those of one form."""
    lanes = dict.fromkeys(forms, 0)
    for own, form in zip(seen, forms, strict=True):
        lanes[form] += own.lanes(form)
    fewest, most = limits.fewest_blocks, limits.most_blocks
    rows = {form: form.lines * min(most, max(fewest, lanes[form] // BLOCK // limits.programs)) for form in lanes}
    return [Cut(own, form, evened(own.rows, rows[form], form.lines)) for own, form in zip(seen, forms, strict=True)]


def width_for(seen: Sequence[Matrices], limits: Limits) -> int:
    """The width of blocks for matrices with nothing behind their columns: wide, but not with too many idle lanes."""
    elements = sum(map(math.prod, seen))
    full_enough = (w for w in WIDTHS if elements >= (1 - limits.idle) * sum(own.lanes(Form(w)) for own in seen))
    return next(full_enough, WIDTHS[-1])


def deep_form(after: int) -> Form:
    return Form(DEEP_WIDTH, min(triton.next_power_of_2(after), DEEPEST))


def evened(rows: int, most: int, lines: int) -> int:
    """The height of tiles of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (pieces(rows, most) * lines))) * lines


def pieces(size: int, most: int) -> int:
    """Into how many pieces of at most so many. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))


class Tiles(NamedTuple):
    """Tiles whose blocks are of one form, for one launch."""

    form: Form
    table: Tensor
    #: What divides the lengths of all rows.
    divisor: int


class Grid:
    """All tiles of some tensors, in tables on the device."""

    def __init__(self, cuts: Sequence[Cut], uploads: Uploads) -> None:
        table = table_of(cuts)
        self.count = len(table)
        owners = table[:, OWNER.value].contiguous()
        #: By tensor, where its tiles begin in the list of all, with the end of the last behind them.
        begins = torch.searchsorted(owners, torch.arange(len(cuts) + 1, dtype=torch.int32))
        self.begins = uploads.table(begins.to(torch.int32))
        self.by_form = []
        for form in dict.fromkeys(own.form for own in cuts):
            chosen = torch.tensor([own.form == form for own in cuts])[owners.long()]
            divisor = math.gcd(*(own.matrices.columns for own in cuts if own.form == form))
            if chosen.any():
                self.by_form.append(Tiles(form, uploads.table(table[chosen]), divisor))


def table_of(cuts: Sequence[Cut]) -> Tensor:
    """The table of tiles. Those of one matrix follow each other, line by line."""
    owners, piece = enumerated(torch.tensor([own.tiles for own in cuts], dtype=torch.int64)).long().unbind(1)
    places, rest = [], piece
    for counts in ([own.behind for own in cuts], [own.along for own in cuts], [own.down for own in cuts]):
        of_owner = torch.tensor(counts, dtype=torch.int64)[owners]
        places.append(rest % of_owner)
        rest = rest // of_owner
    behind, along, down = places
    height = torch.tensor([own.height for own in cuts], dtype=torch.int64)[owners]
    rows = torch.tensor([own.matrices.rows for own in cuts], dtype=torch.int64)[owners]
    first = torch.minimum(down * height, rows)
    end = torch.minimum(first + height, rows)
    index = torch.arange(len(owners))
    return torch.stack([owners, piece, index, rest, down, along, behind, first, end], 1).to(torch.int32).contiguous()


def enumerated(counts: Tensor) -> Tensor:
    """(owner, piece) for each of so many pieces of each owner."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    piece = torch.arange(len(owners)) - (torch.cumsum(counts, 0) - counts)[owners]
    return torch.stack([owners, piece], 1).to(torch.int32).contiguous()
