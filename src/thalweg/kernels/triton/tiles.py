"""Tensors of rows and columns cut into tiles: who works on what, and which lane of a block is which element.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.triton.numbers import is_finite
from thalweg.kernels.triton.tables import Uploads

PLAIN, COMB, DEEP = (tl.constexpr(c) for c in range(3))
#: Of combs: lanes of a step, how many steps a line may have, and how many places at most lie behind a column.
TEETH, STEPS, FEW_PLACES = 256, (8, 4), 32
#: Of deep blocks: columns, and places behind each at most.
DEEP_COLUMNS, DEEPEST = 64, 128
# Columns of the table of tiles: whose it is, its place among its owner's and among all, which matrix of its owner,
# where it lies there, its rows, and the mode of its blocks.
OWNER, PIECE, INDEX, MATRIX, DOWN, ALONG, BEHIND, FIRST_ROW, END_ROW, FORM, TILE = (tl.constexpr(c) for c in range(11))
# Columns of the table of tensors: what a tensor is seen as, the stride of combs, how many tiles a line has where sums
# are made, and how many entries there are for rows, columns and matrices. Behind them: facts of statistics.
ROWS, BETWEEN, ACROSS, AFTER, STRIDE, ALONGS, ENTRIES, GEOMETRY = (tl.constexpr(c) for c in (0, 1, 2, 3, 4, 5, 6, 9))


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


def cut_to_measure(seen: Sequence[Matrices], vector: int = 4) -> list[Cut]:
    """Into tiles for passes that sum rows and columns. vector: elements of one load."""
    # a thread has two loads of a line in hand if they are of four elements, and one if they are of eight
    limits = MEASURING._replace(block=MEASURING.block * 4 // vector)
    return cut(seen, limits, vector, few_places=1)


def cut_to_step(seen: Sequence[Matrices], vector: int = 4) -> list[Cut]:
    """Into tiles for all other passes."""
    return cut(seen, STEPPING, vector, few_places=FEW_PLACES)


def cut(seen: Sequence[Matrices], limits: Limits, vector: int, few_places: int) -> list[Cut]:
    """Into tiles that are about equal, among those of one form. few_places: how many combs are made for."""
    width = width_for([own for own in seen if own.after == 1], limits)
    combs = [own for own in seen if 1 < own.after <= few_places]
    steps = min(STEPS, key=lambda steps: sum(comb(own, steps, vector, limits).lanes for own in combs))
    deepest = max((own.after for own in seen if own.after > few_places), default=1)
    depth = min(triton.next_power_of_2(deepest), DEEPEST)

    def shaped(own: Matrices) -> Cut:
        if own.after == 1:
            return Cut(own, Form(PLAIN.value, width, block=limits.block))
        if own.after <= few_places:
            return comb(own, steps, vector, limits)
        deep = Form(DEEP.value, depth, min(DEEP_COLUMNS, limits.deep_block // depth), limits.deep_block)
        return Cut(own, deep, stride=stride_of(own, vector))

    cuts = [shaped(own) for own in seen]
    lanes = dict.fromkeys((own.form for own in cuts), 0)
    for own in cuts:
        lanes[own.form] += own.lanes
    fewest, most = limits.fewest_blocks, limits.most_blocks
    # lines of a tile, as if all blocks were of the usual size
    lines = {form: max(1, limits.block // (form.width * form.steps)) for form in lanes}
    rows = {
        form: lines[form] * min(most, max(fewest, lanes[form] // limits.block // limits.programs)) for form in lanes
    }
    return [own._replace(height=evened(own.matrices.rows, rows[own.form], own.form.lines)) for own in cuts]


def comb(own: Matrices, steps: int, vector: int, limits: Limits) -> Cut:
    """A tensor with few places behind its columns, of which each lane has one."""
    return Cut(own, Form(COMB.value, TEETH, steps, limits.block), stride=stride_of(own, vector))


def stride_of(own: Matrices, vector: int) -> int:
    """Consecutive elements of each step of a comb: all places behind some columns, and whole loads if lines are."""
    if own.after > FEW_PLACES:
        return 1
    unit = math.lcm(own.after, vector) if own.columns * own.after % vector == 0 else own.after
    return TEETH // unit * unit


def width_for(seen: Sequence[Matrices], limits: Limits) -> int:
    """The width of plain blocks: wide, but not with too many idle lanes."""
    elements = sum(map(math.prod, seen))

    def lanes(width: int) -> int:
        return sum(Cut(own, Form(PLAIN.value, width)).lanes for own in seen)

    widths = limits.widths
    return next((width for width in widths if elements >= (1 - limits.idle) * lanes(width)), widths[-1])


def evened(rows: int, most: int, lines: int) -> int:
    """The height of tiles of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (pieces(rows, most) * lines))) * lines


def pieces(size: int, most: int) -> int:
    """Into how many pieces of at most so many. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))


class Grid:
    """All tiles of some tensors, in tables on the device."""

    def __init__(self, cuts: Sequence[Cut], uploads: Uploads, warps: int) -> None:
        self.warps = warps
        table = table_of(cuts)
        self.count = len(table)
        owners = table[:, OWNER.value].contiguous()
        #: By tensor, where its tiles begin in the list of all, with the end of the last behind them.
        begins = torch.searchsorted(owners, torch.arange(len(cuts) + 1, dtype=torch.int32))
        self.begins = uploads.table(begins.to(torch.int32))
        self.table = uploads.table(table)
        #: By mode, the form of blocks, and what divides the lengths of all their consecutive elements.
        self.forms = {own.form.mode: own.form for own in cuts}
        self.divisors = {
            mode: math.gcd(*(divisor_of(own) for own in cuts if own.form.mode == mode)) for mode in self.forms
        }

    def constants(self, vector: int) -> dict[str, int]:
        """What kernels are compiled for. vector: elements of one load where addresses allow it."""
        given = {"MODES": sum(1 << mode for mode in self.forms)}
        for mode, name in ((PLAIN.value, "PLAIN"), (COMB.value, "COMB"), (DEEP.value, "DEEP")):
            form = self.forms.get(mode, Form(mode, 1))
            given |= {f"{name}_LINES": form.lines, f"{name}_STEPS": form.steps, f"{name}_WIDTH": form.width}
            given[f"{name}_VECTOR"] = vector if self.divisors.get(mode, 1) % vector == 0 else 1
        return given


def divisor_of(own: Cut) -> int:
    """What divides the length of each line, and all places in it where loads begin."""
    if own.form.mode == DEEP.value:
        return own.matrices.after
    line = own.matrices.columns * own.matrices.after
    return math.gcd(line, own.stride) if own.form.mode == COMB.value else line


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
    mode = torch.tensor([own.form.mode for own in cuts], dtype=torch.int64)[owners]
    table = torch.stack([owners, piece, index, rest, down, along, behind, first, end, mode], 1)
    return table.to(torch.int32).contiguous()


def enumerated(counts: Tensor) -> Tensor:
    """(owner, piece) for each of so many pieces of each owner."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), counts)
    piece = torch.arange(len(owners)) - (torch.cumsum(counts, 0) - counts)[owners]
    return torch.stack([owners, piece], 1).to(torch.int32).contiguous()


# ---- what programs do with them


@triton.jit
def lanes_of(
    tensor,
    tile,
    MODE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of one line of a block: where its lanes lie in a line, which are inside, and at which places behind their columns
    they are.
    """
    columns, after, along = tl.load(tensor + ACROSS), tl.load(tensor + AFTER), tl.load(tile + ALONG).to(tl.int64)
    line = columns * after
    if VECTOR > 1:
        line = line // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    step, lane = tl.arange(0, STEPS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    if MODE == PLAIN:
        position = along * WIDTH + lane
        inside = lane < line - along * WIDTH
        behind = tl.zeros((1, 1, 1), tl.int64)
    elif MODE == COMB:
        stride = tl.load(tensor + STRIDE)
        if VECTOR > 1:
            stride = stride // VECTOR * VECTOR
        start = along * STEPS * stride
        position = start + (step * stride + lane)
        inside = (lane < stride) & (step * stride + lane < line - start)
        behind = lane % after
    else:
        column, behind = along * STEPS + step, tl.load(tile + BEHIND).to(tl.int64) * WIDTH + lane
        position = column * after + behind
        inside = (column < columns) & (behind < after)
    return position, inside, behind


@triton.jit
def groups_at(origin, first, end, between, run, along, GROUP: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr):
    """Of a plain block: which groups of codes it has, and which of these are inside. Lines are of whole groups."""
    index = tl.arange(0, LINES * WIDTH // GROUP)
    i = first + index // (WIDTH // GROUP)
    place = along.to(tl.int64) * WIDTH + index % (WIDTH // GROUP) * GROUP
    return ((origin + i * between) * run + place) // GROUP, (i < end) & (place < run)


@triton.jit
def by_place(x, MODE: tl.constexpr):
    """Sums over the columns of a block, for each line and each place behind columns."""
    tl.static_assert(MODE != COMB)
    if MODE == PLAIN:
        return tl.sum(tl.sum(x, 2), 1)[:, None, None]
    else:
        return tl.sum(x, 1)[:, None, :]


@triton.jit
def failures_at(stored, mask):
    """1 where a value to be stored is not finite."""
    return tl.where(mask & (is_finite(stored.to(tl.float32)) == 0), 1.0, 0.0)
