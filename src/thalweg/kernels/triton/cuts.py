"""How tensors of rows and columns are cut into tiles, and the form of the blocks in which programs go through them.

A tensor is seen as (before, rows, between, columns, after): one *matrix* of rows x columns for each place along the
other axes. A *line* is one row of all matrices that lie side by side: columns x after consecutive elements. A *tile* is
a piece of some lines. One program goes through the lines of a tile, a *block* of a few of them at a time.

Blocks are (lines, steps, width). Which elements these are depends on what lies behind a column:

PLAIN   nothing: a block has `width` columns
MIXED   some places: a block has `width` elements of each line, whatever their columns and places
DEEP    some places, by which rows are summed: a block has `steps` columns, and `width` places behind each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from thalweg.arrays import Shape

PLAIN, MIXED, DEEP = (tl.constexpr(c) for c in range(3))
#: Of deep blocks: columns, places behind each, and elements at most.
DEEP_COLUMNS, DEEPEST, DEEP_BLOCK = 64, 128, 512


class Form(NamedTuple):
    """The form of blocks."""

    mode: int
    width: int
    steps: int = 1
    #: Elements of a block.
    block: int = 1

    @property
    def lines(self) -> int:
        return max(1, self.block // (self.width * self.steps))


class Matrices(NamedTuple):
    """A tensor as the kernels see it."""

    before: int
    rows: int
    between: int
    columns: int
    after: int

    @property
    def entries(self) -> tuple[int, int, int]:
        """How many rows, columns and matrices there are in all."""
        matrices = self.before * self.between * self.after
        return matrices * self.rows, matrices * self.columns, matrices


def matrices_of(shape: Shape, row: int, column: int) -> Matrices:
    """How a tensor is seen over these axes. If it has no matrix, as one without rows and columns: its sums are 0, and
    are written too.
    """
    before, between, after = (
        math.prod(shape[:row]),
        math.prod(shape[row + 1 : column]),
        math.prod(shape[column + 1 :]),
    )
    seen = Matrices(before, shape[row], between, shape[column], after)
    return seen if before * between * after else Matrices(1, 0, 1, 0, 1)


class Cut(NamedTuple):
    """How a tensor is cut into tiles: of which form their blocks are, and how many rows they have."""

    matrices: Matrices
    form: Form
    height: int = 1

    @property
    def down(self) -> int:
        return pieces(self.matrices.rows, self.height)

    @property
    def along(self) -> int:
        if self.form.mode == DEEP.value:
            return pieces(self.matrices.columns, self.form.steps)
        return pieces(self.matrices.columns * self.matrices.after, self.form.width)

    @property
    def behind(self) -> int:
        """How many tiles share the same rows and columns."""
        return -(-self.matrices.after // self.form.width) if self.form.mode == DEEP.value else 1

    @property
    def lines(self) -> int:
        """How many pieces of lines there are, as wide as a block."""
        return self.matrices.before * self.matrices.between * self.behind * self.along * self.matrices.rows

    @property
    def tiles(self) -> int:
        return self.matrices.before * self.matrices.between * self.behind * self.along * self.down

    @property
    def lanes(self) -> int:
        """How many elements there would be if all blocks were full."""
        return self.lines * self.form.steps * self.form.width


class Limits(NamedTuple):
    """How many programs a launch should have, and what each of them does at a time."""

    programs: int
    fewest_blocks: int
    most_blocks: int
    #: Elements of a block that is not deep, and warps of the program that has it in hand.
    block: int
    warps: int
    #: How wide such a block may be.
    widths: tuple[int, ...]
    #: What share of their lanes may be idle where rows are shorter than blocks.
    idle: float


# Between those that were best on an H200. Programs that measure sum rows at every block: a single warp does that
# without waiting for others. They keep sums of rows and columns: the fewer there are, the less memory these take. In
# large models it is less than 1/100 of what the parameters take. Programs that step keep nothing.
MEASURING = Limits(1792, 4, 128, block=1024, warps=1, widths=(256, 128), idle=0.3)
STEPPING = Limits(4096, 8, 32, block=2048, warps=4, widths=(1024, 512, 256), idle=0.1)


def cut_to_measure(seen: Sequence[Matrices], vector: int = 4, limits: Limits = MEASURING) -> list[Cut]:
    """Cut tensors into tiles for passes that sum rows and columns. vector: elements of one load."""
    # a thread has two loads of a line in hand if they are of four elements, and one if they are of eight
    deepest = min(triton.next_power_of_2(max((matrices.after for matrices in seen), default=1)), DEEPEST)
    deep = Form(DEEP.value, deepest, min(DEEP_COLUMNS, DEEP_BLOCK // deepest), DEEP_BLOCK)
    return cut(seen, limits._replace(block=limits.block * 4 // vector), deep)


def cut_to_step(seen: Sequence[Matrices], limits: Limits = STEPPING) -> list[Cut]:
    """Cut tensors into tiles for all other passes."""
    widest = width_for([matrices for matrices in seen if matrices.after > 1], limits)
    return cut(seen, limits, Form(MIXED.value, widest, block=limits.block))


def cut(seen: Sequence[Matrices], limits: Limits, behind: Form) -> list[Cut]:
    """Cut tensors into tiles, about equal among those of one form. behind: that of tensors with several places."""
    width = width_for([matrices for matrices in seen if matrices.after == 1], limits)
    plain = Form(PLAIN.value, width, block=limits.block)
    cuts = [Cut(matrices, plain if matrices.after == 1 else behind) for matrices in seen]
    lanes = dict.fromkeys((piece.form for piece in cuts), 0)
    for piece in cuts:
        lanes[piece.form] += piece.lanes
    fewest, most = limits.fewest_blocks, limits.most_blocks
    # lines of a tile, as if all blocks were of the usual size
    lines = {form: max(1, limits.block // (form.width * form.steps)) for form in lanes}
    rows = {
        form: lines[form] * min(most, max(fewest, lanes[form] // limits.block // limits.programs)) for form in lanes
    }
    return [piece._replace(height=evened(piece.matrices.rows, rows[piece.form], piece.form.lines)) for piece in cuts]


def width_for(seen: Sequence[Matrices], limits: Limits) -> int:
    """The width of blocks that are not deep: wide, but not with too many idle lanes."""
    elements = sum(map(math.prod, seen))

    def lanes(width: int) -> int:
        return sum(Cut(matrices, Form(MIXED.value, width)).lanes for matrices in seen)

    widths = limits.widths
    return next((width for width in widths if elements >= (1 - limits.idle) * lanes(width)), widths[-1])


def evened(rows: int, most: int, lines: int) -> int:
    """The height of tiles of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (pieces(rows, most) * lines))) * lines


def pieces(size: int, most: int) -> int:
    """How many pieces of at most ``most`` a size makes. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))
