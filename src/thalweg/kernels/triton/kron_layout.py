"""Where everything is that belongs to one matrix of a batch: its parameter and state, its share of scratch memory.

A *matrix* is a parameter, one slice of a stack, or a block of either, seen as rows and columns; a vector is one row.
Its *figures* are single numbers that the kernels of a step leave for each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import triton
import triton.language as tl

from thalweg.kernels.triton.products import Blocks, Device, blocks_for, ceiling, padded
from thalweg.rules import Kron
from thalweg.rules.grid import Grid

# Columns of the table of addresses; those of panels follow. From POSITION to COLUMNS it holds the numbers themselves.
# M_SCALES: of the codes of M, if it is kept so. POSITION: of its first element within the parameter. ROWS, COLUMNS: a
# block at the end of an axis may have fewer than others, and zeros in the rest of its panels.
P, G, M, M_SCALES, STEP, REFRESH, POSITION, KEY_U, KEY_V, KEY_ROUNDING, OWNER, ROWS, COLUMNS = (
    tl.constexpr(c) for c in range(13)
)
#: Of the factor of rows; that of columns follows.
Q, L = tl.constexpr(13), tl.constexpr(15)
PANELS = 17

# Figures of a matrix. GO: whether it is stepped. FACTOR: of its gradient. DUE: whether its factors are refreshed.
GO, T, FACTOR, DUE, ACCUMULATED, STRENGTH, LARGEST, START, GOOD, H_SQUARE, UPDATE_RMS = (
    tl.constexpr(c) for c in range(11)
)
# Figures of the factor of rows; those of columns follow. NORM: smoothed norm. PACE: of its step. SCALE: what balances
# a new factor. LARGEST_ENTRY: of a matrix whose norm is bounded. TWIST, ANGLE: of its rotation, before it has norm 1.
NORM, PACE, SCALE, LARGEST_ENTRY, TWIST, ANGLE = (tl.constexpr(c) for c in range(11, 23, 2))
FIGURES = 23
#: Behind them: figures that a rule's own formulas leave for each other, at most so many.
OWN_FIGURES = 16

#: Programs that measure one matrix, at most.
MEASURERS = 128
#: Elements that an elementwise program works on.
ELEMENTS = 4096
#: Tiles that are transposed on their way.
TURNED = 64
#: Elements of a vector that one program works on, and rows of a matrix that is multiplied by a vector.
VECTOR, DOTS = 1024, 16
#: Long rows of gram matrices may be summed in parts, at most so many.
PARTS = 16


class Panel(NamedTuple):
    """A matrix, or an array of numbers, in the scratch memory of each matrix of a batch."""

    column: int
    rows: int
    columns: int
    pitch: int
    #: Bytes of an element.
    width: int


@dataclass
class Scratch:
    """The scratch memory of one matrix: what lies where."""

    sizes: list[int] = field(default_factory=list)
    regions: list[int] = field(default_factory=list)

    def panel(self, rows: int, columns: int, width: int, over: Panel | None = None) -> Panel:
        """over: a panel that is no longer needed when this one is written."""
        found = Panel(PANELS + len(self.regions), rows, columns, padded(columns), width)
        size = ceiling(rows * found.pitch * width, 256) * 256
        if over is None:
            self.regions.append(len(self.sizes))
            self.sizes.append(size)
        else:
            region = self.regions[over.column - PANELS]
            self.regions.append(region)
            self.sizes[region] = max(self.sizes[region], size)
        return found

    def numbers(self, count: int) -> Panel:
        return self.panel(1, count, 4)

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def offsets(self) -> list[int]:
        """Of each panel."""
        starts = [sum(self.sizes[:region]) for region in range(len(self.sizes))]
        return [starts[region] for region in self.regions]


@dataclass(frozen=True)
class Factor:
    """The factor of one axis."""

    #: 0: of rows, 1: of columns.
    axis: int
    size: int
    dense: bool
    #: Where each block has its own in the state, and elements from one of its rows there to the next.
    starts: list[int]
    stride: int
    #: Whether rows of all blocks have a multiple of 16 elements.
    aligned: bool
    #: What its gram matrix should be, times the identity, but for smaller blocks.
    right: float
    #: Whether Q is applied twice, which is fewer operations than making P.
    direct: bool


def factors_of(rule: Kron, grid: Grid) -> list[Factor]:
    """The factors of a block: (rows, columns), or (columns,)."""
    found = []
    for key, (n, size, diagonal) in enumerate(zip(grid.sizes, grid.sides, rule.diagonals(grid.sizes), strict=True)):
        axis = key + 2 - len(grid.sides)
        right = math.prod(grid.sides) / max(1, size)
        places = grid.factor_starts(key, diagonal=diagonal)
        aligned = n % 16 == size % 16 == 0
        found.append(Factor(axis, size, not diagonal, *places, aligned, right, direct=2 * right < size))
    return found


class DensePanels:
    """Scratch of a dense factor. Names say what is written first; what follows takes the place of what is over."""

    def __init__(self, scratch: Scratch, device: Device, factor: Factor, width: int, batch: int, *, quad: bool) -> None:
        n = factor.size
        self.turned = scratch.panel(n, n, width)
        self.straight = scratch.panel(n, n, width)
        self.error = scratch.panel(n, n, width)
        self.stepped = scratch.panel(n, n, 4)
        self.stepped_turned = scratch.panel(n, n, width)
        self.square = scratch.panel(n, n, width, over=self.straight)
        self.skew = scratch.panel(n, n, width, over=self.straight)
        self.stepped_straight = self.skew
        self.product = scratch.panel(n, n, width, over=self.error)
        self.product_turned = scratch.panel(n, n, width, over=self.turned)
        self.final_turned = scratch.panel(n, n, width, over=self.stepped_turned)
        self.final_straight = scratch.panel(n, n, width, over=self.straight)
        self.final_square = scratch.panel(n, n, width, over=self.straight)

        self.blocks = blocks_for(device, n, n, width)
        self.triangle = blocks_for(device, n, n, width, square=True)
        # there are few tiles of a gram matrix, and its rows may be long: several programs then share a tile
        length = padded(math.ceil(factor.right))
        # (and what is noted of it takes registers, of which more warps have more)
        self.gram = self.triangle._replace(warps=self.triangle.rows // 16)
        tiles = self.tiles_above(self.gram.rows) * batch
        wanted = device.processors // tiles if length > device.long else 1
        self.length = padded(ceiling(length, max(1, min(wanted, PARTS))))
        self.parts = ceiling(length, self.length)
        self.part_sums = scratch.panel(self.parts * n, n, 4) if self.parts > 1 else None

        side = max(ceiling(n, self.gram.rows), ceiling(n, TURNED))
        self.tile_largest = scratch.numbers(side * side)
        self.column_squares = scratch.panel(side, n, 4)
        self.best, self.best_column = scratch.numbers(side), scratch.numbers(side)
        self.vector = scratch.numbers(n)
        self.vector_squares = scratch.numbers(ceiling(n, DOTS))
        self.image_squares = scratch.numbers(ceiling(n, DOTS))
        self.first = scratch.numbers(side * (side + 1) // 2)
        self.second = scratch.numbers(self.blocks.tiles(n, n))
        self.sums_count = side * (side + 1) // 2 if quad else self.blocks.tiles(n, n)
        self.largest, self.sums = scratch.numbers(self.sums_count), scratch.numbers(self.sums_count)

    def tiles_above(self, block: int) -> int:
        """Tiles of this size on and above the diagonal."""
        side = ceiling(self.turned.rows, block)
        return side * (side + 1) // 2


class DiagonalPanels:
    """Scratch of a diagonal factor."""

    def __init__(self, scratch: Scratch, factor: Factor, parts: int) -> None:
        n = factor.size
        #: The squares of what is applied.
        self.squares = scratch.numbers(n)
        self.stepped = scratch.numbers(n)
        #: The diagonal of the gram matrix: sums over the tiles that found parts of them, and then as a whole.
        self.parts = parts
        self.part_sums = scratch.panel(parts, n, 4)
        self.left = scratch.numbers(n)
        self.sums_count = ceiling(n, VECTOR)
        self.left_largest = scratch.numbers(self.sums_count)
        self.largest, self.sums = scratch.numbers(self.sums_count), scratch.numbers(self.sums_count)


class Layout:
    """What one matrix of a batch needs, and how its products are tiled."""

    def __init__(self, rule: Kron, grid: Grid, device: Device, width: int, batch: int) -> None:
        self.factors = factors_of(rule, grid)
        self.rows, self.columns = (1, *grid.sides)[-2:]
        #: Elements from one row of it in the parameter to the next.
        self.stride = grid.sizes[-1]
        rows, columns = self.rows, self.columns
        dense = [factor for factor in self.factors if factor.dense]
        self.scratch = scratch = Scratch()
        self.measured = scratch.panel(3, MEASURERS, 4)
        self.wide = self.narrow = Blocks(1, 1, 1, 1, 1)
        self.failures = scratch.numbers(self.tiles_of_elements)

        # the gradient, along the axis of a dense factor: transposed if that is the rows' alone
        self.across = len(dense) == 1 and dense[0].axis == 0
        gradient = (columns, rows) if self.across else (rows, columns)
        self.gradient = scratch.panel(*gradient, width)
        self.between = scratch.panel(*gradient, width) if any(f.direct for f in dense) else None
        self.half = self.half_between = self.white = self.white_turned = None
        if len(dense) == 2:
            self.half = scratch.panel(columns, rows, width)
            self.half_between = scratch.panel(columns, rows, width) if dense[0].direct else None
            self.white = scratch.panel(rows, columns, width, over=self.gradient)
            self.white_turned = scratch.panel(columns, rows, width)
            self.h = scratch.panel(rows, columns, 4, over=self.white_turned)
        elif dense:
            self.white = scratch.panel(*gradient[::-1], width)
            self.h = scratch.panel(rows, columns, 4, over=self.white)
        else:
            self.h = scratch.panel(rows, columns, 4)
        self.wide = blocks_for(device, rows, columns, width)
        self.narrow = blocks_for(device, columns, rows, width)
        self.h_tiles = self.wide.tiles(rows, columns) if dense else self.tiles_of_elements
        self.h_squares = scratch.numbers(self.h_tiles)

        quad = rule.geometry == "quad"
        self.dense: dict[int, DensePanels] = {}
        self.diagonal: dict[int, DiagonalPanels] = {}
        for factor in self.factors:
            if factor.dense:
                self.dense[factor.axis] = DensePanels(scratch, device, factor, width, batch, quad=quad)
            else:
                self.diagonal[factor.axis] = DiagonalPanels(scratch, factor, self.parts_of_gram(factor, dense))

    def parts_of_gram(self, factor: Factor, dense: list[Factor]) -> int:
        """In how many parts the diagonal of a gram matrix is found: one for each tile across the other axis."""
        if dense:
            other = self.rows if factor.axis else self.columns
            blocks = self.wide if factor.axis else self.narrow
            return ceiling(other, blocks.rows)
        high, wide = self.element_tile
        return ceiling(self.rows, high) if factor.axis else ceiling(self.columns, wide)

    @property
    def element_tile(self) -> tuple[int, int]:
        """Rows and columns of the tile that an elementwise program works on."""
        if self.rows == 1:
            return 1, ELEMENTS // 4  # whatever the length: what is compiled for one vector serves all
        wide = min(max(triton.next_power_of_2(self.columns), 64), 128 if self.rows > 8 else ELEMENTS // 2)
        return min(ELEMENTS // wide, max(1, triton.next_power_of_2(self.rows))), wide

    @property
    def tiles_of_elements(self) -> int:
        high, wide = self.element_tile
        return ceiling(padded(self.rows) if self.rows > 1 else 1, high) * ceiling(padded(self.columns), wide)
