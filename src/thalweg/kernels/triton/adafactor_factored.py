"""Adafactor with factored squares. 24 bytes a parameter in float32: the first pass reads g and p (8) for sums of rows and
columns, the second reads g (4) for the RMS of u, the third reads g and p and writes p (12).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.triton import adafactor_tiles as tiles
from thalweg.kernels.triton.adafactor_decision import (
    COLUMNS_OF_WHOLE,
    COUNTS,
    DECAY,
    EPS,
    GAIN,
    INNER,
    OUTER,
    ROWS_OF_WHOLE,
    AdafactorPasses,
    at_least,
    inverse_sqrt,
    weight_of_squares,
)
from thalweg.kernels.triton.adafactor_tiles import (
    ACROSS,
    AFTER,
    ALONG,
    BEHIND,
    BETWEEN,
    BY_COLUMN,
    BY_MATRIX,
    BY_ROW,
    COPIES,
    DOWN,
    FACTS,
    FIELDS,
    FIRST,
    HEIGHT,
    INDEX,
    KINDS,
    LENGTH,
    MATRIX,
    OLD,
    OWNER,
    ROWS,
    STATISTICS,
    TILE_FIELDS,
    Tiles,
    places_of,
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
from thalweg.kernels.triton.tables import ALIGNMENT, COLUMNS, STATE, Operand, P, add_up, step_number
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
        shapes = [
            tuple(operand.p.shape[stacked:])
            for operand, slices in zip(operands, self.tables.slices, strict=True)
            for _ in range(slices)
        ]
        self.tiles = Tiles(shapes, (axes[0] - stacked, axes[1] - stacked), self.uploads)
        self.partials = self.empty(1, self.tiles.count)
        self.u_totals = self.empty(self.tables.count, 1)
        #: Elements that one load takes, where rows begin at addresses for the widest ones.
        large = [[operand.p, *operand.entries[2:]] for operand in operands]
        self.vector = ALIGNMENT // min(t.element_size() for t in (*large[0], grads[0]) if t is not None)
        self.aligned = self.tiles.divisor % self.vector == 0 and all(
            t.data_ptr() % ALIGNMENT == 0 for own in large for t in own if t is not None
        )

    def measured(self, step: Step) -> Iterator[list[Sum]]:
        row, column = self.axes
        self.sweep(step, MEASURE)
        self.tiles.add_up()
        add_up(self.partials, self.tiles.begins, self.totals)
        over = (column,), (row,), (row, column), (row,)
        sums = [Sum(total, axes) for total, axes in zip(self.tiles.totals, over, strict=True)]
        yield [*sums, Sum(self.totals, None)]
        self.average()
        self.sweep(step, WHITEN)
        add_up(self.partials, self.tiles.begins, self.u_totals)
        yield [Sum(self.u_totals, None)]
        self.decide_from(step, self.totals, self.u_totals, None)
        if self.guarded:
            self.sweep(step, REHEARSE)
            add_up(self.partials, self.tiles.begins, self.failures)
            yield [Sum(self.failures, None)]
        self.settle(step, counts=self.handling.on_nonfinite != "raise")

    def flags(self) -> dict[str, Any]:
        row_dtype, column_dtype, _ = self.entry_dtypes
        return dict(R_DTYPE=DTYPES[row_dtype], C_DTYPE=DTYPES[column_dtype], **super().flags())

    def average(self) -> None:
        """From sums to new averages of squares, in the same place; the state has the old ones until all is written."""
        if len(self.tiles.every):
            row_dtype, column_dtype, _ = self.entry_dtypes
            average_kernel[(len(self.tiles.every),)](
                self.tables.rows,
                self.options,
                self.counts,
                self.tiles.matrices,
                self.tiles.every,
                self.tiles.sums,
                CLAMP=self.rule.eps_mode == "clamp",
                R_DTYPE=DTYPES[row_dtype],
                C_DTYPE=DTYPES[column_dtype],
                BLOCK=tiles.ENTRIES,
                num_warps=4,
            )

    def sweep(self, step: Step, stage: int) -> None:
        """One stage over all tiles, those of equal form in one launch."""
        for form, own in self.tiles.by_form.items():
            if not len(own):
                continue
            arguments = (
                self.tables.rows,
                self.tables.gradients,
                self.tiles.matrices,
                own,
                self.tiles.sums,
                self.options,
                self.partials,
                step.grad_scale,
                step.allowed,
            )
            flags = dict(
                SCALED=step.grad_scale is not None,
                ALLOWED=step.allowed is not None,
                LONG=self.tiles.long,
                VECTOR=self.vector if self.aligned and self.tables.grads_aligned and form.depth == 1 else 1,
                P_DTYPE=DTYPES[self.p_dtype],
                G_DTYPE=DTYPES[self.g_dtype],
                LINES=form.lines,
                WIDTH=form.width,
                DEPTH=form.depth,
                **tiles.LAUNCH,
            )
            if stage == MEASURE:
                measure_kernel[(len(own),)](*arguments, R_DTYPE=DTYPES[self.entry_dtypes[0]], **flags)
            else:
                step_kernel[(len(own),)](
                    *arguments,
                    self.figures,
                    self.tables.count,
                    len(own),
                    STAGE=stage,
                    GUARDED=self.guarded,
                    STOCHASTIC=self.handling.rounding == "stochastic" and self.p_dtype in NARROW,
                    SPREAD=self.spread,
                    **self.flags(),
                    **flags,
                )


# ---- where a tile lies


@triton.jit
def columns_of(tensor, tile, LONG: tl.constexpr, VECTOR: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr):
    """Places of a tile's columns in a row (WIDTH, DEPTH), and which of them there are."""
    columns = tl.load(tensor + ACROSS)
    if VECTOR > 1:
        columns = columns // VECTOR * VECTOR  # so it is anyway: compilers see that no load is cut short
    column = tl.load(tile + ALONG) * WIDTH + tl.arange(0, WIDTH)[:, None]
    if DEPTH == 1:
        return column, column < columns
    else:
        k = tl.load(tile + BEHIND) * DEPTH + tl.arange(0, DEPTH)[None, :]
        after = tl.load(tensor + AFTER)
        inner = column * after + k
        if not LONG:
            inner = inner.to(tl.int32)
        return inner, (column < columns) & (k < after)


@triton.jit
def block_of(tensor, inner, LONG: tl.constexpr, LINES: tl.constexpr):
    """Places of a block's elements, seen from the beginning of its first row."""
    stride = tl.load(tensor + BETWEEN) * tl.load(tensor + ACROSS) * tl.load(tensor + AFTER)
    offset = (tl.arange(0, LINES) * stride)[:, None, None] + inner[None, :, :]
    if LONG:
        return offset
    else:
        return offset.to(tl.int32)


@triton.jit
def rows_of(tensor, tile):
    """The first row of a tile, and the end; the line of its matrix's first row among those of all matrices."""
    rows, between, height = tl.load(tensor + ROWS), tl.load(tensor + BETWEEN), tl.load(tensor + HEIGHT)
    matrix = tl.load(tile + MATRIX).to(tl.int64)
    first = tl.load(tile + DOWN) * height
    return first, tl.minimum(first + height, rows), (matrix // between) * rows * between + matrix % between


@triton.jit
def elements(base, offset, VECTOR: tl.constexpr):
    """Places of elements, with what is known of their addresses."""
    places = base + offset
    if VECTOR > 1:
        places = tl.multiple_of(places, (1, 16, 1))
    return places


@triton.jit
def base_of(rows, row, column: tl.constexpr, DTYPE: tl.constexpr):
    return tl.load(rows + row * COLUMNS + column).to(tl.pointer_type(DTYPE))


# ---- the passes


@triton.jit
def measure_kernel(
    rows,
    gradients,
    matrices,
    tiles,
    sums,
    numbers,
    partials,
    grad_scale,
    allowed,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
    LONG: tl.constexpr,
    VECTOR: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    R_DTYPE: tl.constexpr,
    LINES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Of one tile: squares of g by row, by column and by matrix; old averages of rows; squares of p."""
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(rows, row, allowed, 0, 0, ALLOWED, False):
        return
    tensor = matrices + row * FIELDS
    by_row, by_column = tensor + STATISTICS + FACTS * BY_ROW, tensor + STATISTICS + FACTS * BY_COLUMN
    by_matrix, by_old = tensor + STATISTICS + FACTS * BY_MATRIX, tensor + STATISTICS + FACTS * OLD
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    run = tl.load(tensor + ACROSS) * after
    inner, inside = columns_of(tensor, tile, LONG, VECTOR, WIDTH, DEPTH)
    first, end, origin = rows_of(tensor, tile)
    k = tl.load(tile + BEHIND) * DEPTH + tl.arange(0, DEPTH)
    block = block_of(tensor, inner, LONG, LINES)
    entry = (tl.arange(0, LINES) * between * after)[:, None] + k[None, :]
    down, along, is_first = tl.load(tile + DOWN), tl.load(tile + ALONG), tl.load(tile + ALONG) == 0

    p_base, g_base = base_of(rows, row, P, P_DTYPE), tl.load(gradients + row).to(tl.pointer_type(G_DTYPE))
    row_averages = base_of(rows, row, STATE, R_DTYPE)
    row_sums = sums + places_of(by_row, along, 0)
    factor = gradient_factor(numbers, grad_scale, SCALED)
    squares_of_columns, squares_of_p = tl.zeros((WIDTH, DEPTH), tl.float32), tl.zeros((WIDTH, DEPTH), tl.float32)
    old = tl.zeros((LINES, DEPTH), tl.float32)
    while first < end:
        line = origin + first * between
        left = first + tl.arange(0, LINES) < end
        mask = left[:, None, None] & inside[None, :, :]
        g = tl.load(elements(g_base + line * run, block, VECTOR), mask, other=0.0).to(tl.float32) * factor
        p = tl.load(elements(p_base + line * run, block, VECTOR), mask, other=0.0).to(tl.float32)
        mask_of_rows = left[:, None] & (k < after)[None, :]
        averages = tl.load(row_averages + line * after + entry, mask_of_rows & is_first, other=0.0)
        old += averages.to(tl.float32)
        squares = g * g
        tl.store(row_sums + line * after + entry, tl.sum(squares, 1), mask_of_rows)
        squares_of_columns += tl.sum(squares, 0)
        squares_of_p += tl.sum(p * p, 0)
        first += LINES
    matrix = tl.load(tile + MATRIX).to(tl.int64)
    copy = down * tl.load(by_row + COPIES) + along
    tl.store(sums + places_of(by_column, down, matrix * run + inner), squares_of_columns, inside)
    tl.store(sums + places_of(by_matrix, copy, matrix * after + k), tl.sum(squares_of_columns, 0), k < after)
    tl.store(sums + places_of(by_old, down, matrix * after + k), tl.sum(old, 0), (k < after) & is_first)
    tl.store(partials + tl.load(tile + INDEX), tl.sum(squares_of_p))


@triton.jit
def average_kernel(
    rows,
    numbers,
    counts,
    matrices,
    blocks,
    sums,
    CLAMP: tl.constexpr,
    R_DTYPE: tl.constexpr,
    C_DTYPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """New averages of squares of some rows, of some columns or of some whole matrices, from their sums."""
    which, block = tl.load(blocks + 2 * tl.program_id(0)), tl.load(blocks + 2 * tl.program_id(0) + 1)
    row, kind = (which // KINDS).to(tl.int64), which % KINDS
    tensor = matrices + row * FIELDS
    statistic = tensor + STATISTICS + FACTS * kind
    entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < tl.load(statistic + LENGTH)
    height = tl.load(counts + COUNTS * row + ROWS_OF_WHOLE)
    width = tl.load(counts + COUNTS * row + COLUMNS_OF_WHOLE)
    if kind == BY_ROW:
        added = width
        old = tl.load(base_of(rows, row, STATE, R_DTYPE) + entry, mask, other=0.0).to(tl.float32)
    elif kind == BY_COLUMN:
        added = height
        old = tl.load(base_of(rows, row, STATE + 1, C_DTYPE) + entry, mask, other=0.0).to(tl.float32)
    else:  # the average of the new averages of rows follows from the same sums
        added = height * width
        old = tl.load(sums + tl.load(tensor + STATISTICS + FACTS * OLD + FIRST) + entry, mask, other=0.0) / height
    place = sums + tl.load(statistic + FIRST) + entry
    square = tl.load(place, mask, other=0.0) / added
    if not CLAMP:
        square = square + tl.load(numbers + EPS)
    weight = weight_of_squares(step_number(rows, row), numbers)
    tl.store(place, (1.0 - weight) * old + weight * square, mask)


@triton.jit
def step_kernel(
    rows,
    gradients,
    matrices,
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
    LONG: tl.constexpr,
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
    DEPTH: tl.constexpr,
):
    """One tile in one stage: squares of u; a rehearsal of the step; the step."""
    number = tl.program_id(0)
    if STAGE == 3 or (STAGE == 2 and GUARDED):  # every other pass goes backwards, as in passes.turn
        number = tile_count - 1 - number
    tile = tiles + number * TILE_FIELDS
    row = tl.load(tile + OWNER).to(tl.int64)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    tensor = matrices + row * FIELDS
    between, after = tl.load(tensor + BETWEEN), tl.load(tensor + AFTER)
    run = tl.load(tensor + ACROSS) * after
    inner, inside = columns_of(tensor, tile, LONG, VECTOR, WIDTH, DEPTH)
    first, end, origin = rows_of(tensor, tile)
    k = tl.load(tile + BEHIND) * DEPTH + tl.arange(0, DEPTH)
    block = block_of(tensor, inner, LONG, LINES)
    entry = (tl.arange(0, LINES) * between * after)[:, None] + k[None, :]
    matrix = tl.load(tile + MATRIX).to(tl.int64)

    # what g is multiplied by, but for its row
    eps = tl.load(numbers + EPS)
    by_matrix = sums + tl.load(tensor + STATISTICS + FACTS * BY_MATRIX + FIRST)
    mean = tl.load(by_matrix + matrix * after + k, k < after, other=0.0)
    by_column = sums + tl.load(tensor + STATISTICS + FACTS * BY_COLUMN + FIRST)
    column_averages = tl.load(by_column + matrix * run + inner, inside, other=0.0)
    if CLAMP:
        across = column_averages / at_least(mean, eps)[None, :]
    else:
        across = inverse_sqrt(column_averages)
        mean = tl.where(mean > 0, mean, 1.0)
    found = tl.zeros((WIDTH, DEPTH), tl.float32)
    inner_scale, outer_scale, decay, gain = 0.0, 0.0, 0.0, tl.load(numbers + GAIN)
    if STAGE != 3:
        inner_scale = tl.load(figures + INNER * count + row)
        outer_scale = tl.load(figures + OUTER * count + row)
        decay = tl.load(figures + DECAY * count + row)
        uppermost = inside & (tl.load(tile + DOWN) == 0)
        if STAGE == 2:
            column_place = base_of(rows, row, STATE + 1, C_DTYPE) + matrix * run + inner
            tl.store(column_place, as_stored(column_averages, 0.0, C_DTYPE, False), uppermost)
        elif C_DTYPE == tl.float16:
            found += failures_at(column_averages.to(C_DTYPE), uppermost)

    p_base, g_base = base_of(rows, row, P, P_DTYPE), tl.load(gradients + row).to(tl.pointer_type(G_DTYPE))
    m_base, row_averages = base_of(rows, row, STATE + 2, M_DTYPE), base_of(rows, row, STATE, R_DTYPE)
    by_row = sums + tl.load(tensor + STATISTICS + FACTS * BY_ROW + FIRST)
    factor = gradient_factor(numbers, grad_scale, SCALED)
    is_first = tl.load(tile + ALONG) == 0
    row_failures = tl.zeros((LINES, DEPTH), tl.float32)
    while first < end:
        line = origin + first * between
        left = first + tl.arange(0, LINES) < end
        mask = left[:, None, None] & inside[None, :, :]
        mask_of_rows = left[:, None] & (k < after)[None, :]
        g = tl.load(elements(g_base + line * run, block, VECTOR), mask, other=0.0).to(tl.float32) * factor
        averages = tl.load(by_row + line * after + entry, mask_of_rows, other=0.0)
        if CLAMP:
            u = g * (1.0 / at_least(tl.sqrt_rn(averages[:, None, :] * across[None, :, :]), eps))
        else:
            u = g * inverse_sqrt(averages / mean[None, :])[:, None, :] * across[None, :, :]
        if STAGE == 3:
            found += tl.sum(u * u, 0)
        else:
            p_place = elements(p_base + line * run, block, VECTOR)
            m_place = elements(m_base + line * run, block, VECTOR)
            p = tl.load(p_place, mask, other=0.0).to(tl.float32)
            m = u * inner_scale
            if AVERAGED:
                m = (1.0 - gain) * tl.load(m_place, mask, other=0.0).to(tl.float32) + gain * m
            new = p - (m * outer_scale + decay * p)
            stored = as_parameter(new, rows, row, line * run + block, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
            if STAGE == 2:
                tl.store(p_place, stored, mask)
                if AVERAGED:
                    tl.store(m_place, as_stored(m, 0.0, M_DTYPE, False), mask)
                place = row_averages + line * after + entry
                tl.store(place, as_stored(averages, 0.0, R_DTYPE, False), mask_of_rows & is_first)
            else:
                found += tl.sum(failures_at(stored, mask), 0)
                if AVERAGED and M_DTYPE == tl.float16:
                    found += tl.sum(failures_at(m.to(M_DTYPE), mask), 0)
                if R_DTYPE == tl.float16:
                    row_failures += failures_at(averages.to(R_DTYPE), mask_of_rows & is_first)
        first += LINES
    if STAGE != 2:
        tl.store(partials + tl.load(tile + INDEX), tl.sum(found) + tl.sum(row_failures))


@triton.jit
def failures_at(stored, mask):
    """1 where a value to be stored is not finite."""
    return tl.where(mask & (is_finite(stored.to(tl.float32)) == 0), 1.0, 0.0)
