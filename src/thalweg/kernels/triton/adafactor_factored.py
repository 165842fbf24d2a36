"""Adafactor with factored squares. 24 bytes a parameter in float32: the first pass reads g and p (8) for sums of rows
and columns, the second reads g (4) for the RMS of u, the third reads g and p and writes p (12).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.triton.adafactor_decision import AdafactorPasses
from thalweg.kernels.triton.adafactor_step import base_of, step_kernel
from thalweg.kernels.triton.adafactor_sums import (
    ACROSS,
    AFTER,
    BETWEEN,
    BY_COLUMN,
    BY_MATRIX,
    BY_ROW,
    COPIES,
    OF_P,
    OLD,
    ROWS,
    TENSOR,
    Statistics,
    copy_of,
    statistic_of,
)
from thalweg.kernels.triton.adafactor_tiles import (
    ALONG,
    BEHIND,
    DOWN,
    END_ROW,
    FIRST_ROW,
    MATRIX,
    OWNER,
    PIECE,
    TILE,
    WARPS,
    Grid,
    Tiles,
    cut_to_measure,
    cut_to_step,
    matrices_of,
)
from thalweg.kernels.triton.launching import kind_of
from thalweg.kernels.triton.passes import DTYPES, MEASURE, NARROW, REHEARSE, Step, Sum, gradient_factor
from thalweg.kernels.triton.tables import ALIGNMENT, STATE, Operand, P, add_up, loaded
from thalweg.rules import Adafactor
from thalweg.settings import Handling

#: The stage beside those of all rules: squares of u are added up.
WHITEN = 3


class FactoredPasses(AdafactorPasses):
    SUMS = 1
    CHUNK = 2**40  # one for each tensor: these passes go through tiles

    def __init__(
        self, operands: Sequence[Operand], grads: Sequence[Tensor], rule: Adafactor, handling: Handling
    ) -> None:
        super().__init__(operands, grads, rule, handling)
        stacked, axes = rule.stacked_axes, rule.factored_axes(operands[0].shape or tuple(operands[0].p.shape))
        assert axes is not None
        self.axes = axes
        seen = [
            matrices_of(tuple(operand.p.shape[stacked:]), axes[0] - stacked, axes[1] - stacked)
            for operand, slices in zip(operands, self.tables.slices, strict=True)
            for _ in range(slices)
        ]
        cuts = cut_to_measure(seen)
        self.statistics = Statistics(cuts, self.uploads)
        self.measuring, self.stepping = Grid(cuts, self.uploads), Grid(cut_to_step(seen), self.uploads)
        self.partials = self.empty(self.SUMS, self.stepping.count)
        #: Elements that one load takes, where all rows begin at addresses for the widest ones.
        large = [[tensor for tensor in (operand.p, *operand.entries[2:]) if tensor is not None] for operand in operands]
        self.vector = ALIGNMENT // min(tensor.element_size() for tensor in (*large[0], grads[0]))
        self.aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for own in large for tensor in own)

    def flags(self) -> dict[str, Any]:
        row_dtype, column_dtype, _ = self.entry_dtypes
        return dict(R_DTYPE=DTYPES[row_dtype], C_DTYPE=DTYPES[column_dtype], **super().flags())

    def flags_of_averages(self) -> dict[str, Any]:
        flags = self.flags()
        return {key: flags[key] for key in ("CLAMP", "R_DTYPE", "C_DTYPE")}

    def flags_of_tiles(self, step: Step, stage: int, tiles: Tiles, wide: bool) -> dict[str, Any]:
        """What the kernel of a stage is compiled for."""
        flags = dict(
            SCALED=step.grad_scale is not None,
            VECTOR=self.vector if wide else 1,
            P_DTYPE=DTYPES[self.p_dtype],
            G_DTYPE=DTYPES[self.g_dtype],
            LINES=tiles.form.lines,
            WIDTH=tiles.form.width,
        )
        if stage == MEASURE:
            return dict(**flags, R_DTYPE=DTYPES[self.entry_dtypes[0]], DEPTH=tiles.form.depth)
        return dict(
            **flags,
            **self.flags(),
            STAGE=stage,
            ALLOWED=step.allowed is not None,
            GUARDED=self.guarded,
            STOCHASTIC=self.handling.rounding == "stochastic" and self.p_dtype in NARROW,
            SPREAD=self.spread,
            MIXED=tiles.form.mixed,
        )

    def measured(self, step: Step) -> Iterator[list[Sum]]:
        row, column = self.axes
        self.sweep(step, MEASURE)
        self.statistics.add_up(self.compiled)
        over = (column,), (row,), (row, column), (row,), None
        yield [Sum(total, axes) for total, axes in zip(self.statistics.totals, over, strict=True)]
        self.statistics.average(self.compiled, self.tables.rows, self.options, self.counts, self.flags_of_averages)
        self.sweep(step, WHITEN)
        add_up(self.compiled, self.partials, self.stepping.begins, self.totals)
        yield [Sum(self.totals, None)]
        self.decide_from(step, self.statistics.totals[OF_P.value], self.totals, None)
        if self.guarded:
            self.sweep(step, REHEARSE)
            add_up(self.compiled, self.partials, self.stepping.begins, self.failures)
            yield [Sum(self.failures, None)]
        self.settle(step, counts=self.handling.on_nonfinite != "raise")

    def sweep(self, step: Step, stage: int) -> None:
        """One stage over all tiles, those of one form in one launch."""
        for tiles in (self.measuring if stage == MEASURE else self.stepping).by_form:
            arguments: tuple[Any, ...] = (
                self.tables.rows,
                self.tables.gradients,
                self.statistics.tensors,
                tiles.table,
                self.statistics.sums,
                self.options,
                step.grad_scale,
            )
            count, wide = len(tiles.table), self.loads_widely(tiles)
            kernel = measure_kernel
            if stage != MEASURE:
                kernel = step_kernel
                arguments += (step.allowed, self.figures, self.partials, self.tables.count, count)
            flags = functools.partial(self.flags_of_tiles, step, stage, tiles, wide)
            key = tiles.form, stage, wide, kind_of(step.grad_scale), kind_of(step.allowed)
            self.compiled.run(kernel, (count,), arguments, flags, warps=WARPS, key=key)

    def loads_widely(self, tiles: Tiles) -> bool:
        even = tiles.form.depth == 1 and tiles.divisor % self.vector == 0
        return even and self.aligned and self.tables.grads_aligned


@triton.jit
def down_columns(block):
    """What sums of columns keep of a block: its rows are summed at once where each thread has all of a column.

    Where threads share columns, which they do if there are places behind them, that waits for the last block.
    """
    if block.shape[2] == 1:
        return tl.sum(block, 0)[None, :, :]
    else:
        return block


@triton.jit
def measure_kernel(
    rows,
    gradients,
    tensors,
    tiles,
    sums,
    numbers,
    grad_scale,
    SCALED: tl.constexpr,
    VECTOR: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    R_DTYPE: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one tile: squares of g by row, by column and by matrix; old averages of rows; squares of p.

    Blocks are (LINES, WIDTH, DEPTH): rows, columns, places behind.
    """
    tile = tiles + tl.program_id(0) * TILE
    row = tl.load(tile + OWNER).to(tl.int64)
    tensor = tensors + row * TENSOR
    between, columns, after = tl.load(tensor + BETWEEN), tl.load(tensor + ACROSS), tl.load(tensor + AFTER)
    run = columns * after
    if VECTOR > 1:
        columns = columns // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    column = tl.load(tile + ALONG) * WIDTH + tl.arange(0, WIDTH)[:, None]
    k = tl.load(tile + BEHIND) * DEPTH + tl.arange(0, DEPTH)[None, :]
    if DEPTH == 1:
        inner = column
        inside = column < columns
    else:
        inner = column * after + k
        inside = (column < columns) & (k < after)
    matrix = tl.load(tile + MATRIX).to(tl.int64)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between  # the line of its first row
    down, along = tl.load(tile + DOWN), tl.load(tile + ALONG)
    by_row = statistic_of(tensor, BY_ROW)

    p_base, g_base = base_of(rows, row, P, P_DTYPE), tl.load(gradients + row).to(tl.pointer_type(G_DTYPE))
    row_averages, row_sums = base_of(rows, row, STATE, R_DTYPE), sums + copy_of(by_row, along)
    factor = gradient_factor(numbers, grad_scale, SCALED)
    squares_of_g = down_columns(tl.zeros((LINES, WIDTH, DEPTH), tl.float32))
    squares_of_p = squares_of_g
    old = tl.zeros((LINES, DEPTH), tl.float32)
    first, end = tl.load(tile + FIRST_ROW), tl.load(tile + END_ROW)
    while first < end:
        i = first + tl.arange(0, LINES)
        line = origin + i * between
        mask = (i < end)[:, None, None] & inside[None, :, :]
        offset = (line * run)[:, None, None] + inner[None, :, :]
        p_place, g_place = p_base + offset, g_base + offset
        if VECTOR > 1:
            p_place, g_place = tl.multiple_of(p_place, (1, 16, 1)), tl.multiple_of(g_place, (1, 16, 1))
        g = loaded(g_place, mask) * factor
        p = loaded(p_place, mask)
        entry, mask_of_rows = (line * after)[:, None] + k, (i < end)[:, None] & (k < after)
        old += loaded(row_averages + entry, mask_of_rows & (along == 0))
        squares = g * g
        tl.store(row_sums + entry, tl.sum(squares, 1), mask_of_rows)
        squares_of_g += down_columns(squares)
        squares_of_p += down_columns(p * p)
        first += LINES
    squares_of_columns = tl.sum(squares_of_g, 0)

    by_column = copy_of(statistic_of(tensor, BY_COLUMN), down)
    by_matrix = copy_of(statistic_of(tensor, BY_MATRIX), down * tl.load(by_row + COPIES) + along)
    olds = copy_of(statistic_of(tensor, OLD), down)
    tl.store(sums + by_column + matrix * run + inner, squares_of_columns, inside)
    tl.store(sums + by_matrix + matrix * after + k, tl.sum(squares_of_columns, 0)[None, :], k < after)
    tl.store(sums + olds + matrix * after + k, tl.sum(old, 0)[None, :], (k < after) & (along == 0))
    of_p = copy_of(statistic_of(tensor, OF_P), tl.load(tile + PIECE))
    tl.store(sums + of_p, tl.sum(squares_of_p))
