"""Tiles on the device: which program works on which tile, and which lane of a block is which element."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.cuts import DEEP, MIXED, PLAIN, Cut, Form

# Columns of the table of tiles: whose it is, its place among its owner's, which matrix of its owner, where it lies
# there, its rows, and the mode of its blocks.
OWNER, PIECE, MATRIX, DOWN, ALONG, BEHIND, FIRST_ROW, END_ROW, FORM, TILE = (tl.constexpr(c) for c in range(10))
# Columns of the table of tensors: what a tensor is seen as, how many tiles a line has where sums are made, and how many
# entries there are for rows, columns and matrices. Behind them: facts of statistics.
ROWS, BETWEEN, ACROSS, AFTER, ALONGS, ENTRIES, GEOMETRY = (tl.constexpr(c) for c in (0, 1, 2, 3, 4, 5, 8))


class Grid:
    """All tiles of some tensors, in tables on the device."""

    def __init__(self, cuts: Sequence[Cut], vector: int, statistics: Any, uploads: Any, warps: int) -> None:
        """vector: elements of one load where addresses allow it."""
        self.vector, self.warps = vector, warps
        begins = array("i", itertools.accumulate((cut.tiles for cut in cuts), initial=0))
        self.count = begins[-1]
        #: By tensor, where its tiles begin in the list of all, with the end of the last behind them.
        self.begins = uploads.table(begins)
        #: What programs find their tiles by.
        self.given = statistics.tensors, uploads.table(table_of(cuts), TILE.value), statistics.sums
        #: By mode, the form of blocks, and what divides the lengths of all their consecutive elements.
        self.forms = {cut.form.mode: cut.form for cut in cuts}
        self.divisors = {
            mode: math.gcd(*(divisor_of(cut) for cut in cuts if cut.form.mode == mode)) for mode in self.forms
        }

    def constants(self, aligned: bool) -> dict[str, int]:
        """What kernels are compiled for. aligned: whether addresses allow the widest loads."""
        vector = self.vector if aligned else 1
        constants = {"MODES": sum(1 << mode for mode in self.forms)}
        for mode, name in ((PLAIN.value, "PLAIN"), (MIXED.value, "MIXED"), (DEEP.value, "DEEP")):
            form = self.forms.get(mode, Form(mode, 1))
            constants |= {f"{name}_LINES": form.lines, f"{name}_STEPS": form.steps, f"{name}_WIDTH": form.width}
            constants[f"{name}_VECTOR"] = vector if self.divisors.get(mode, 1) % vector == 0 else 1
        return constants


def divisor_of(cut: Cut) -> int:
    """What divides the length of each line, and all places in it where loads begin."""
    return cut.matrices.after * (1 if cut.form.mode == DEEP.value else cut.matrices.columns)


def table_of(cuts: Sequence[Cut]) -> array[int]:
    """The table of tiles. Those of one matrix follow each other, line by line."""
    table = array("i")
    for owner, cut in enumerate(cuts):
        behinds, alongs, downs, tiles = cut.behind, cut.along, cut.down, cut.tiles
        rows, height, mode = cut.matrices.rows, cut.height, cut.form.mode
        for piece in range(tiles):
            rest, behind = divmod(piece, behinds)
            rest, along = divmod(rest, alongs)
            matrix, down = divmod(rest, downs)
            first = min(down * height, rows)
            table.extend((owner, piece, matrix, down, along, behind, first, min(first + height, rows), mode))
    return table


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
    if MODE != DEEP:
        position = along * WIDTH + lane
        inside = lane < line - along * WIDTH
        if MODE == PLAIN:
            behind = tl.zeros((1, 1, 1), tl.int64)
        else:
            behind = ((along * WIDTH % after).to(tl.int32) + lane) % after.to(tl.int32)
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
    tl.static_assert(MODE != MIXED)
    if MODE == PLAIN:
        return tl.sum(tl.sum(x, 2), 1)[:, None, None]
    else:
        return tl.sum(x, 1)[:, None, :]
