"""How tensors of rows and columns are cut into tiles, and the form of the blocks in which programs go through them.

A tensor is seen as (before, rows, between, columns, after): one *matrix* of rows x columns for each place along the
other axes. A *line* is one row of all matrices that lie side by side: columns x after consecutive elements. A *tile* is
a piece of some lines. One program goes through the lines of a tile, a *block* of a few of them at a time.

Blocks are (lines, steps, width). Which elements these are depends on what lies behind a column:

PLAIN   nothing: a block has `width` columns
COMB    a few places: each of its steps has as many consecutive elements as are a multiple of the places, so that every
        lane stays at one place, and hardly any is idle
DEEP    many places, or a few where rows are summed: a block has `steps` columns, and `width` places behind each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl

from thalweg.arrays import Shape

PLAIN, COMB, DEEP = (tl.constexpr(c) for c in range(3))
#: Of combs: lanes of a step, how many steps a line may have, and how many places at most lie behind a column.
TEETH, STEPS, FEW_PLACES = 256, (8, 4), 32
#: Of deep blocks: columns, and places behind each at most.
DEEP_COLUMNS, DEEPEST = 64, 128


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

    def columns(self, stride: int) -> int:
        """How much of a line a block has: elements, or columns where it is deep."""
        return {PLAIN.value: self.width, COMB.value: self.steps * stride, DEEP.value: self.steps}[self.mode]


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
    #: Consecutive elements of each step of a comb.
    stride: int = 1

    @property
    def down(self) -> int:
        return pieces(self.matrices.rows, self.height)

    @property
    def along(self) -> int:
        line = self.matrices.columns * (self.matrices.after if self.form.mode == COMB.value else 1)
        return pieces(line, self.form.columns(self.stride))

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
    #: Elements of a block, of a deep one, and warps of the program that has it in hand.
    block: int
    deep_block: int
    warps: int
    #: How many columns a plain block may have.
    widths: tuple[int, ...]
    #: What share of their lanes may be idle where rows are shorter than blocks.
    idle: float


# Between those that were best on an H200. Programs that measure sum rows at every block: a single warp does that
# without waiting for others. They keep sums of rows and columns: the fewer there are, the less memory these take. In
# large models it is less than 1/100 of what the parameters take. Programs that step keep nothing.
MEASURING = Limits(1792, 4, 128, block=1024, deep_block=512, warps=1, widths=(256, 128), idle=0.3)
STEPPING = Limits(4096, 8, 32, block=2048, deep_block=1024, warps=4, widths=(1024, 512, 256), idle=0.1)


def cut_to_measure(seen: Sequence[Matrices], vector: int = 4, limits: Limits = MEASURING) -> list[Cut]:
    """Cut tensors into tiles for passes that sum rows and columns. vector: elements of one load."""
    # a thread has two loads of a line in hand if they are of four elements, and one if they are of eight
    return cut(seen, limits._replace(block=limits.block * 4 // vector), vector, few_places=1)


def cut_to_step(seen: Sequence[Matrices], vector: int = 4, limits: Limits = STEPPING) -> list[Cut]:
    """Cut tensors into tiles for all other passes."""
    return cut(seen, limits, vector, few_places=FEW_PLACES)


def cut(seen: Sequence[Matrices], limits: Limits, vector: int, few_places: int) -> list[Cut]:
    """Cut tensors into tiles, about equal among those of one form. few_places: how many combs are made for."""
    width = width_for([matrices for matrices in seen if matrices.after == 1], limits)
    combs = [matrices for matrices in seen if 1 < matrices.after <= few_places]
    steps = min(STEPS, key=lambda steps: sum(comb(matrices, steps, vector, limits).lanes for matrices in combs))
    deepest = max((matrices.after for matrices in seen if matrices.after > few_places), default=1)
    depth = min(triton.next_power_of_2(deepest), DEEPEST)

    def shaped(matrices: Matrices) -> Cut:
        if matrices.after == 1:
            return Cut(matrices, Form(PLAIN.value, width, block=limits.block))
        if matrices.after <= few_places:
            return comb(matrices, steps, vector, limits)
        deep = Form(DEEP.value, depth, min(DEEP_COLUMNS, limits.deep_block // depth), limits.deep_block)
        return Cut(matrices, deep, stride=stride_of(matrices, vector))

    cuts = [shaped(matrices) for matrices in seen]
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


def comb(matrices: Matrices, steps: int, vector: int, limits: Limits) -> Cut:
    """A tensor with few places behind its columns, of which each lane has one."""
    return Cut(matrices, Form(COMB.value, TEETH, steps, limits.block), stride=stride_of(matrices, vector))


def stride_of(matrices: Matrices, vector: int) -> int:
    """Consecutive elements of each step of a comb: all places behind some columns, and whole loads if lines are."""
    if matrices.after > FEW_PLACES:
        return 1
    unit = math.lcm(matrices.after, vector) if matrices.columns * matrices.after % vector == 0 else matrices.after
    return TEETH // unit * unit


def width_for(seen: Sequence[Matrices], limits: Limits) -> int:
    """The width of plain blocks: wide, but not with too many idle lanes."""
    elements = sum(map(math.prod, seen))

    def lanes(width: int) -> int:
        return sum(Cut(matrices, Form(PLAIN.value, width)).lanes for matrices in seen)

    widths = limits.widths
    return next((width for width in widths if elements >= (1 - limits.idle) * lanes(width)), widths[-1])


def evened(rows: int, most: int, lines: int) -> int:
    """The height of tiles of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (pieces(rows, most) * lines))) * lines


def pieces(size: int, most: int) -> int:
    """How many pieces of at most ``most`` a size makes. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))
