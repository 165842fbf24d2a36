"""How tensors are cut into pieces, one for each program, and which lane of a program's block is which element.

A tensor is seen as (before, rows, between, columns, after): one *matrix* of rows x columns for each place along the
other axes. A *line* is one row of all matrices that lie side by side: columns x after consecutive elements. A piece is
a part of some lines. A program goes through its lines, a *block* of a few of them at a time. To a rule whose sums all
go over whole tensors, a tensor is a run of elements, and lines are as long as blocks.

Blocks are (lines, steps, width). Which elements these are is their *mode*. Of runs:

RUN     a piece that is full, which needs no mask, and is read and written in wider blocks
END     the last piece of a tensor

Of rows and columns it depends on what lies behind a column:

PLAIN   nothing: a block has `width` columns
MIXED   some places: a block has `width` elements of each line, whatever their columns and places
DEEP    some places, by which rows are summed: a block has `steps` columns, and `width` places behind each
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl

from thalweg.arrays import Shape
from thalweg.kernels.triton.stages import BLOCK, PIECES, WARPS

RUN, END, PLAIN, MIXED, DEEP = (tl.constexpr(c) for c in range(5))
#: What kernels call the sizes of blocks by, of runs and of lines.
OF_RUNS = {"RUN": RUN.value, "END": END.value}
OF_LINES = {"PLAIN": PLAIN.value, "MIXED": MIXED.value, "DEEP": DEEP.value}
#: Columns of the table of tensors: what one is seen as, how many rows, columns, matrices and tensors it has, and how it
#: is cut where lines are summed and where they are not. Behind them: where its sums are.
ROWS, BETWEEN, ACROSS, AFTER, ENTRIES, CUTS, GEOMETRY = (tl.constexpr(c) for c in (0, 1, 2, 3, 4, 8, 18))
#: Of a cut: the mode of its blocks, rows of a piece, and how many pieces there are down, along and behind.
FORM, HEIGHT, DOWNS, ALONGS, BEHINDS, FACTS_OF_CUT = (tl.constexpr(c) for c in range(6))
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
    def entries(self) -> tuple[int, int, int, int]:
        """How many rows, columns, matrices and tensors there are in all."""
        matrices = self.before * self.between * self.after
        return matrices * self.rows, matrices * self.columns, matrices, 1


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
    """How a tensor is cut into pieces: of which form their blocks are, and how many rows they have."""

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
        if self.form.mode == RUN.value:
            return pieces(self.matrices.columns, self.form.width * self.height)
        return pieces(self.matrices.columns * self.matrices.after, self.form.width)

    @property
    def behind(self) -> int:
        """How many pieces share the same rows and columns."""
        return -(-self.matrices.after // self.form.width) if self.form.mode == DEEP.value else 1

    @property
    def lines(self) -> int:
        """How many pieces of lines there are, as wide as a block."""
        return self.matrices.before * self.matrices.between * self.behind * self.along * self.matrices.rows

    @property
    def pieces(self) -> int:
        return self.matrices.before * self.matrices.between * self.behind * self.along * self.down

    @property
    def lanes(self) -> int:
        """How many elements there would be if all blocks were full."""
        return self.lines * self.form.steps * self.form.width

    @property
    def facts(self) -> tuple[int, ...]:
        """As the table of tensors has it."""
        return self.form.mode, self.height, self.down, self.along, self.behind


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


def cut_into_runs(sizes: Sequence[int], blocks: int) -> list[Cut]:
    """Cut tensors into runs of elements. blocks: how many a program goes through in turn."""
    return [Cut(Matrices(1, 1, 1, size, 1), Form(RUN.value, BLOCK), blocks) for size in sizes]


def cut_to_measure(seen: Sequence[Matrices], vector: int = 4, limits: Limits = MEASURING) -> list[Cut]:
    """Cut tensors into pieces for passes that sum rows and columns. vector: elements of one load."""
    # a thread has two loads of a line in hand if they are of four elements, and one if they are of eight
    deepest = min(triton.next_power_of_2(max((matrices.after for matrices in seen), default=1)), DEEPEST)
    deep = Form(DEEP.value, deepest, min(DEEP_COLUMNS, DEEP_BLOCK // deepest), DEEP_BLOCK)
    return cut(seen, limits._replace(block=limits.block * 4 // vector), deep)


def cut_to_step(seen: Sequence[Matrices], limits: Limits = STEPPING) -> list[Cut]:
    """Cut tensors into pieces for all other passes."""
    widest = width_for([matrices for matrices in seen if matrices.after > 1], limits)
    return cut(seen, limits, Form(MIXED.value, widest, block=limits.block))


def cut(seen: Sequence[Matrices], limits: Limits, behind: Form) -> list[Cut]:
    """Cut tensors into pieces, about equal among those of one form. behind: that of tensors with several places."""
    width = width_for([matrices for matrices in seen if matrices.after == 1], limits)
    plain = Form(PLAIN.value, width, block=limits.block)
    cuts = [Cut(matrices, plain if matrices.after == 1 else behind) for matrices in seen]
    lanes = dict.fromkeys((piece.form for piece in cuts), 0)
    for piece in cuts:
        lanes[piece.form] += piece.lanes
    fewest, most = limits.fewest_blocks, limits.most_blocks
    # lines of a piece, as if all blocks were of the usual size
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
    """The height of pieces of at most so many rows that are as equal as whole blocks allow."""
    return max(1, -(-rows // (pieces(rows, most) * lines))) * lines


def pieces(size: int, most: int) -> int:
    """How many pieces of at most ``most`` a size makes. At least one: what is empty has sums too, which are 0."""
    return max(1, -(-size // most))


def enumerate_pieces(counts: Sequence[int]) -> array[int]:
    """(owner, piece) for each of so many pieces of each owner."""
    table, place = array("i", bytes(8 * sum(counts))), 0
    for owner, count in enumerate(counts):
        end = place + 2 * count
        table[place:end:2] = array("i", [owner]) * count
        table[place + 1 : end : 2] = array("i", range(count))
        place = end
    return table


class Grid:
    """All pieces of some tensors, and what kernels that go through them are compiled for."""

    def __init__(self, cuts: Sequence[Cut], uploads: Any, *, is_summed: bool, vector: int) -> None:
        """is_summed: whether lines are summed. vector: elements of one load where addresses allow it."""
        self.cuts, self.vector, self.is_summed = cuts, vector, is_summed
        self.warps = MEASURING.warps if is_summed else WARPS
        counts = [cut.pieces for cut in cuts]
        #: By tensor, where its pieces begin in the list of all.
        self.begins = list(itertools.accumulate(counts, initial=0))
        self.count = self.begins[-1]
        #: Of each piece: whose it is, and which of its owner's.
        self.table = uploads.table(enumerate_pieces(counts), 2)
        #: By mode, the form of blocks, and what divides the lengths of all their consecutive elements.
        self.forms = {cut.form.mode: cut.form for cut in cuts}
        self.divisors = {
            mode: math.gcd(*(divisor_of(cut) for cut in cuts if cut.form.mode == mode)) for mode in self.forms
        }
        if RUN.value in self.forms:
            self.forms[END.value], self.divisors[END.value] = Form(END.value, BLOCK // PIECES.value), 0

    def constants(self, aligned: bool) -> dict[str, int]:
        """What kernels are compiled for. aligned: whether addresses allow the widest loads."""
        vector = self.vector if aligned else 1
        constants = {"CUT": int(not self.is_summed), "MODES": sum(1 << mode for mode in self.forms), "CHUNK": 1}
        if RUN.value in self.forms:
            constants["CHUNK"] = BLOCK * self.cuts[0].height
        for name, mode in (OF_RUNS | OF_LINES).items():
            form = self.forms.get(mode, Form(mode, 1))
            constants |= {f"{name}_LINES": form.lines, f"{name}_STEPS": form.steps, f"{name}_WIDTH": form.width}
            constants[f"{name}_VECTOR"] = vector if self.divisors.get(mode, 1) % vector == 0 else 1
        return constants


def divisor_of(cut: Cut) -> int:
    """What divides the length of each line, and all places in it where loads begin. Of runs, loads do."""
    if cut.form.mode == RUN.value:
        return 0
    return cut.matrices.after * (1 if cut.form.mode == DEEP.value else cut.matrices.columns)


# ---- what programs do with them


@triton.jit
def cut_of(tensor, which: tl.constexpr):
    """Where the facts of a cut are: of that where lines are summed (0), or of the other (1)."""
    return tensor + CUTS + FACTS_OF_CUT * which


@triton.jit
def piece_of(tensor, cut, piece):
    """Where a piece lies: the line of its matrix's first row, the matrix, and the place down, along and behind."""
    behinds, alongs = tl.load(cut + BEHINDS).to(tl.int32), tl.load(cut + ALONGS).to(tl.int32)
    downs, between = tl.load(cut + DOWNS).to(tl.int32), tl.load(tensor + BETWEEN)
    behind, rest = piece % behinds, piece // behinds
    along, rest = rest % alongs, rest // alongs
    matrix = (rest // downs).to(tl.int64)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between
    return origin, matrix, rest % downs, along, behind


@triton.jit
def lanes_of(
    tensor,
    along,
    place,
    MODE: tl.constexpr,
    VECTOR: tl.constexpr,
    STEPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Of one line of a block: where its lanes lie in a line, which are inside, and at which places behind their columns
    they are.
    """
    columns, after, along = tl.load(tensor + ACROSS), tl.load(tensor + AFTER), along.to(tl.int64)
    line = columns * after
    if VECTOR > 1:
        line = line // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    step, lane = tl.arange(0, STEPS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    if MODE != DEEP:
        position = along * WIDTH + lane
        inside = lane < line - along * WIDTH
        if MODE == PLAIN:
            behind = tl.zeros((1, 1, 1), tl.int64)
        else:
            behind = ((along * WIDTH % after).to(tl.int32) + lane) % after.to(tl.int32)
    else:
        column, behind = along * STEPS + step, place.to(tl.int64) * WIDTH + lane
        position = column * after + behind
        inside = (column < columns) & (behind < after)
    return position, inside, behind


@triton.jit
def groups_at(
    start,
    left,
    origin,
    first,
    end,
    between,
    run,
    along,
    MODE: tl.constexpr,
    GROUP: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Which groups of codes a block has, and which of these are inside. Lines are of whole groups, and not deep."""
    index = tl.arange(0, LINES * WIDTH // GROUP)
    if MODE <= END:
        index += first * (WIDTH // GROUP)
        groups, mask = start // GROUP + index, index < left // GROUP
    else:
        i = first + index // (WIDTH // GROUP)
        place = along.to(tl.int64) * WIDTH + index % (WIDTH // GROUP) * GROUP
        groups, mask = ((origin + i * between) * run + place) // GROUP, (i < end) & (place < run)
    return groups, mask


@triton.jit
def by_place(x, MODE: tl.constexpr):
    """Sums over the columns of a block, for each line and each place behind columns."""
    tl.static_assert(MODE != MIXED)
    if MODE == PLAIN:
        return tl.sum(tl.sum(x, 2), 1)[:, None, None]
    else:
        return tl.sum(x, 1)[:, None, :]


@triton.jit
def matrix_of_row(tensor, entry):
    """To which matrix an entry for a row belongs."""
    inner = tl.load(tensor + BETWEEN) * tl.load(tensor + AFTER)
    return (entry // (tl.load(tensor + ROWS) * inner)) * inner + entry % inner


@triton.jit
def matrix_of_column(tensor, entry):
    after = tl.load(tensor + AFTER)
    return (entry // (tl.load(tensor + ACROSS) * after)) * after + entry % after
