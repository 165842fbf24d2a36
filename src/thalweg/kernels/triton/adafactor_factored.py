"""Adafactor with factored squares. 24 bytes a parameter in float32: the first pass reads g and p (8) for sums of rows
and columns, the second reads g (4) for the RMS of u, the third reads g and p and writes p (12).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.cpu.plan import seen_as
from thalweg.kernels.triton.adafactor_decision import (
    DECAY,
    EPS,
    GAIN,
    INNER,
    OUTER,
    AdafactorPasses,
    at_least,
    inverse_sqrt,
)
from thalweg.kernels.triton.adafactor_sums import (
    ACROSS,
    AFTER,
    BETWEEN,
    BY_COLUMN,
    BY_MATRIX,
    BY_ROW,
    COPIES,
    FIRST,
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
    INDEX,
    MATRIX,
    OWNER,
    TILE,
    WARPS,
    Grid,
    Matrices,
    Tiles,
    cut_to_measure,
    cut_to_step,
)
from thalweg.kernels.triton.numbers import as_stored, is_finite
from thalweg.kernels.triton.passes import (
    DTYPES,
    MEASURE,
    NARROW,
    REHEARSE,
    Step,
    Sum,
    as_parameter,
    gradient_factor,
    is_idle,
)
from thalweg.kernels.triton.tables import ALIGNMENT, COLUMNS, STATE, Operand, P, add_up, loaded
from thalweg.rules import Adafactor
from thalweg.settings import Handling

#: The stage beside those of all rules: squares of u are added up.
WHITEN = 3


class FactoredPasses(AdafactorPasses):
    SUMS = 1

    def __init__(
        self, operands: Sequence[Operand], grads: Sequence[Tensor], rule: Adafactor, handling: Handling
    ) -> None:
        super().__init__(operands, grads, rule, handling)
        stacked, axes = rule.stacked_axes, rule.factored_axes(operands[0].shape or tuple(operands[0].p.shape))
        assert axes is not None
        self.axes = axes
        seen = [
            Matrices(*seen_as(tuple(operand.p.shape[stacked:]), axes[0] - stacked, axes[1] - stacked))
            for operand, slices in zip(operands, self.tables.slices, strict=True)
            for _ in range(slices)
        ]
        cuts = cut_to_measure(seen)
        self.statistics = Statistics(cuts, self.uploads)
        self.measuring, self.stepping = Grid(cuts, self.uploads), Grid(cut_to_step(seen), self.uploads)
        self.partials = self.empty(1, max(self.measuring.count, self.stepping.count))
        self.u_totals = self.empty(self.tables.count, 1)
        #: Elements that one load takes, where all rows begin at addresses for the widest ones.
        large = [[tensor for tensor in (operand.p, *operand.entries[2:]) if tensor is not None] for operand in operands]
        self.vector = ALIGNMENT // min(tensor.element_size() for tensor in (*large[0], grads[0]))
        self.aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for own in large for tensor in own)

    def flags(self) -> dict[str, Any]:
        row_dtype, column_dtype, _ = self.entry_dtypes
        return dict(R_DTYPE=DTYPES[row_dtype], C_DTYPE=DTYPES[column_dtype], **super().flags())

    def measured(self, step: Step) -> Iterator[list[Sum]]:
        row, column = self.axes
        self.sweep(step, MEASURE)
        self.statistics.add_up()
        add_up(self.partials, self.measuring.begins, self.totals)
        over = (column,), (row,), (row, column), (row,)
        sums = [Sum(total, axes) for total, axes in zip(self.statistics.totals, over, strict=True)]
        yield [*sums, Sum(self.totals, None)]
        flags = self.flags()
        self.statistics.average(
            self.tables.rows, self.options, self.counts, **{key: flags[key] for key in ("CLAMP", "R_DTYPE", "C_DTYPE")}
        )
        self.sweep(step, WHITEN)
        add_up(self.partials, self.stepping.begins, self.u_totals)
        yield [Sum(self.u_totals, None)]
        self.decide_from(step, self.totals, self.u_totals, None)
        if self.guarded:
            self.sweep(step, REHEARSE)
            add_up(self.partials, self.stepping.begins, self.failures)
            yield [Sum(self.failures, None)]
        self.settle(step, counts=self.handling.on_nonfinite != "raise")

    def sweep(self, step: Step, stage: int) -> None:
        """One stage over all tiles, those of one form in one launch."""
        for tiles in (self.measuring if stage == MEASURE else self.stepping).by_form:
            arguments = (
                self.tables.rows,
                self.tables.gradients,
                self.statistics.tensors,
                tiles.table,
                self.statistics.sums,
                self.options,
                self.partials,
                step.grad_scale,
                step.allowed,
            )
            flags = dict(
                SCALED=step.grad_scale is not None,
                ALLOWED=step.allowed is not None,
                VECTOR=self.vector if self.loads_widely(tiles) else 1,
                P_DTYPE=DTYPES[self.p_dtype],
                G_DTYPE=DTYPES[self.g_dtype],
                LINES=tiles.form.lines,
                WIDTH=tiles.form.width,
                num_warps=WARPS,
            )
            if stage == MEASURE:
                row_dtype = DTYPES[self.entry_dtypes[0]]
                measure_kernel[(len(tiles.table),)](*arguments, **flags, R_DTYPE=row_dtype, DEPTH=tiles.form.depth)
            else:
                step_kernel[(len(tiles.table),)](
                    *arguments,
                    self.figures,
                    self.tables.count,
                    len(tiles.table),
                    STAGE=stage,
                    GUARDED=self.guarded,
                    STOCHASTIC=self.handling.rounding == "stochastic" and self.p_dtype in NARROW,
                    SPREAD=self.spread,
                    MIXED=tiles.form.mixed,
                    **self.flags(),
                    **flags,
                )

    def loads_widely(self, tiles: Tiles) -> bool:
        even = tiles.form.depth == 1 and tiles.divisor % self.vector == 0
        return even and self.aligned and self.tables.grads_aligned


@triton.jit
def base_of(rows, row, column: tl.constexpr, DTYPE: tl.constexpr):
    """Where a row's parameter or one of its state entries begins."""
    return tl.load(rows + row * COLUMNS + column).to(tl.pointer_type(DTYPE))


@triton.jit
def measure_kernel(
    rows,
    gradients,
    tensors,
    tiles,
    sums,
    numbers,
    partials,
    grad_scale,
    allowed,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
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
    if is_idle(partials, row, allowed, 0, 0, ALLOWED, False):
        return
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
    squares_of_columns, squares_of_p = tl.zeros((WIDTH, DEPTH), tl.float32), tl.zeros((WIDTH, DEPTH), tl.float32)
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
        squares_of_columns += tl.sum(squares, 0)
        squares_of_p += tl.sum(p * p, 0)
        first += LINES

    by_column = copy_of(statistic_of(tensor, BY_COLUMN), down)
    by_matrix = copy_of(statistic_of(tensor, BY_MATRIX), down * tl.load(by_row + COPIES) + along)
    olds = copy_of(statistic_of(tensor, OLD), down)
    tl.store(sums + by_column + matrix * run + inner, squares_of_columns, inside)
    tl.store(sums + by_matrix + matrix * after + k, tl.sum(squares_of_columns, 0)[None, :], k < after)
    tl.store(sums + olds + matrix * after + k, tl.sum(old, 0)[None, :], (k < after) & (along == 0))
    tl.store(partials + tl.load(tile + INDEX), tl.sum(squares_of_p))


@triton.jit
def step_kernel(
    rows,
    gradients,
    tensors,
    tiles,
    sums,
    numbers,
    partials,
    grad_scale,
    allowed,
    figures,
    count,
    tile_count,
    STAGE: tl.constexpr,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
    GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr,
    MIXED: tl.constexpr,
    VECTOR: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    R_DTYPE: tl.constexpr,
    C_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    AVERAGED: tl.constexpr,
    CLAMP: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile in one stage: squares of u; a rehearsal of the step; the step.

    Blocks are (LINES, WIDTH). MIXED: consecutive elements are of matrices that lie side by side.
    """
    number = tl.program_id(0)
    if STAGE == 3 or (STAGE == 2 and GUARDED):  # every other pass goes backwards, as in passes.turn
        number = tile_count - 1 - number
    tile = tiles + number * TILE
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor = tensors + row * TENSOR
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    run = tl.load(tensor + ACROSS) * after
    start = tl.load(tile + ALONG).to(tl.int64) * WIDTH
    left = run - start
    if VECTOR > 1:
        left = left // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    inner = tl.arange(0, WIDTH)[None, :]
    inside = inner < left
    matrix = tl.load(tile + MATRIX).to(tl.int64)
    origin = (matrix // between) * tl.load(tensor + ROWS) * between + matrix % between  # the line of its first row
    k = tl.zeros((1, 1), tl.int32)
    if MIXED:
        k = ((start % after).to(tl.int32) + inner) % after.to(tl.int32)
    # one column in each matrix has to do with its averages of rows
    writes_rows = (inner < after - start) if MIXED else (k == start)

    # what g is multiplied by, but for its row
    eps = tl.load(numbers + EPS)
    mean = tl.load(sums + tl.load(statistic_of(tensor, BY_MATRIX) + FIRST) + matrix * after + k)
    column_entry = matrix * run + start + inner
    column_averages = loaded(sums + tl.load(statistic_of(tensor, BY_COLUMN) + FIRST) + column_entry, inside)
    if CLAMP:
        across = column_averages / at_least(mean, eps)
    else:
        across = inverse_sqrt(column_averages)
        mean = tl.where(mean > 0, mean, 1.0)
    found = tl.zeros((1, WIDTH), tl.float32)
    inner_scale, outer_scale, decay, gain = 0.0, 0.0, 0.0, tl.load(numbers + GAIN)
    if STAGE != 3:
        inner_scale = tl.load(figures + INNER * count + row)
        outer_scale = tl.load(figures + OUTER * count + row)
        decay = tl.load(figures + DECAY * count + row)
        uppermost = inside & (tl.load(tile + DOWN) == 0)
        if STAGE == 2:
            column_place = base_of(rows, row, STATE + 1, C_DTYPE) + column_entry
            tl.store(column_place, as_stored(column_averages, 0.0, C_DTYPE, False), uppermost)
        elif C_DTYPE == tl.float16:
            found += failures_at(column_averages.to(C_DTYPE), uppermost)

    p_base, g_base = base_of(rows, row, P, P_DTYPE), tl.load(gradients + row).to(tl.pointer_type(G_DTYPE))
    m_base, row_averages = base_of(rows, row, STATE + 2, M_DTYPE), base_of(rows, row, STATE, R_DTYPE)
    by_row = sums + tl.load(statistic_of(tensor, BY_ROW) + FIRST)
    factor = gradient_factor(numbers, grad_scale, SCALED)
    first, end = tl.load(tile + FIRST_ROW), tl.load(tile + END_ROW)
    while first < end:
        i = first + tl.arange(0, LINES)[:, None]
        line = origin + i * between
        mask = (i < end) & inside
        offset = line * run + start + inner
        p_place, g_place, m_place = p_base + offset, g_base + offset, m_base + offset
        if VECTOR > 1:
            p_place, g_place = tl.multiple_of(p_place, (1, 16)), tl.multiple_of(g_place, (1, 16))
            m_place = tl.multiple_of(m_place, (1, 16))
        g = loaded(g_place, mask) * factor
        averages = loaded(by_row + line * after + k, i < end)
        if CLAMP:
            u = g * (1.0 / at_least(tl.sqrt_rn(averages * across), eps))
        else:
            u = g * inverse_sqrt(averages / mean) * across
        if STAGE == 3:
            found += tl.sum(u * u, 0)[None, :]
        else:
            p = loaded(p_place, mask)
            m = u * inner_scale
            if AVERAGED:
                m = (1.0 - gain) * loaded(m_place, mask) + gain * m
            new = p - (m * outer_scale + decay * p)
            stored = as_parameter(new, rows, row, offset, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
            row_mask = (i < end) & writes_rows
            if STAGE == 2:
                tl.store(p_place, stored, mask)
                if AVERAGED:
                    tl.store(m_place, as_stored(m, 0.0, M_DTYPE, False), mask)
                tl.store(row_averages + line * after + k, as_stored(averages, 0.0, R_DTYPE, False), row_mask)
            else:
                found += tl.sum(failures_at(stored, mask), 0)[None, :]
                if AVERAGED and M_DTYPE == tl.float16:
                    found += tl.sum(failures_at(m.to(M_DTYPE), mask), 0)[None, :]
                if R_DTYPE == tl.float16:
                    found += tl.sum(failures_at(averages.to(R_DTYPE), row_mask), 0)[None, :]
        first += LINES
    if STAGE != 2:
        tl.store(partials + tl.load(tile + INDEX), tl.sum(found))


@triton.jit
def failures_at(stored, mask):
    """1 where a value to be stored is not finite."""
    return tl.where(mask & (is_finite(stored.to(tl.float32)) == 0), 1.0, 0.0)
