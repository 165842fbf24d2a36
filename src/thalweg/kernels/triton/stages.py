"""What the kernels of all passes do: whether they write, how they round and add up, and what settles a step."""

from __future__ import annotations

import triton
import triton.language as tl

from thalweg.kernels.triton.numbers import as_stored, half_of, is_finite
from thalweg.kernels.triton.rows import COLUMNS, STEP, draws_of

#: Elements that one program works on at a time, and the warps it has. Measured on an H200.
BLOCK, WARPS = 2048, 4
#: Neighbours that a thread has of a block, whatever dtypes are read and written.
TOGETHER = tl.constexpr(4)
#: Pieces in which a block is worked on at the end of a tensor. Masked elements take a register each, and every program
#: has as many registers as the longest path needs: whole blocks there would leave room for 2 programs where 7 fit.
PIECES = tl.constexpr(4)
#: Stages of passes.
MEASURE, REHEARSE, WRITE = 0, 1, 2
#: The first option of every rule: 1, or -1 to climb.
SIGN = tl.constexpr(0)
#: Every rule's first figure: whether a tensor's step is finite. The second: the number of the step.
FINITE, T = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def is_allowed(allowed, ALLOWED: tl.constexpr):
    """Whether the step may be taken at all."""
    if ALLOWED:
        return tl.load(allowed) != 0
    else:
        return True


@triton.jit
def is_idle(figures, row, allowed, count, STAGE: tl.constexpr, ALLOWED: tl.constexpr, GUARDED: tl.constexpr):
    """Whether a program has nothing to write: the step, or this tensor's, is not taken."""
    if STAGE == 2:
        idle = is_allowed(allowed, ALLOWED) == 0
        if GUARDED:
            idle = idle | (tl.load(figures + FINITE * count + row) == 0)
        return idle
    else:
        return False


@triton.jit
def rounded(new, rows, row, first, index, t, P_DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr, SPREAD: tl.constexpr):
    """New values of a parameter's elements at step t, rounded as it is stored."""
    chance = 0
    if STOCHASTIC:
        chance = half_of(draws_of(rows, row, 0, first, index, t, SPREAD), False)
    return as_stored(new, chance, P_DTYPE, STOCHASTIC)


@triton.jit
def by_neighbours(x):
    """Sums of a few neighbours, which threads have without asking one another."""
    return tl.sum(tl.reshape(x, (x.numel // TOGETHER, TOGETHER)), 1)


@triton.jit
def failures_at(stored, mask):
    """1 where a value to be stored is not finite."""
    failed = is_finite(stored.to(tl.float32)) == 0
    if mask is not None:
        failed = failed & mask
    return tl.where(failed, 1.0, 0.0)


@triton.jit
def gradient_factor(numbers, grad_scale, SCALED: tl.constexpr):
    """What gradients are multiplied by before anything else."""
    factor = 1.0
    if SCALED:
        factor = tl.load(numbers + SIGN)
        if grad_scale is not None:
            factor = factor * tl.load(grad_scale).to(tl.float32)
    return factor


@triton.jit
def number_of(x):
    """A number that is given as it is, or in memory."""
    value = x
    if hasattr(x, "dtype"):  # an interpreted kernel is given Python's own numbers
        if x.dtype.is_ptr():
            value = tl.load(x).to(tl.float32)
    return value * 1.0


@triton.jit
def settle_kernel(
    rows,
    operand_begins,
    figures,
    failures,
    allowed,
    finite,
    count,
    GUARDED: tl.constexpr,
    ALLOWED: tl.constexpr,
    COUNTS: tl.constexpr,
):
    """Whether one parameter is stepped, in all its slices or in none; its count goes on if it is."""
    operand = tl.program_id(0)
    begin, end = tl.load(operand_begins + operand), tl.load(operand_begins + operand + 1)
    stepped = 1.0
    if ALLOWED:
        stepped = tl.where(tl.load(allowed) != 0, 1.0, 0.0)
    if GUARDED:
        row = begin
        while row < end:
            fine = (tl.load(figures + FINITE * count + row) != 0) & (tl.load(failures + row) == 0)
            stepped = tl.where(fine, stepped, 0.0)
            row += 1
        row = begin
        while row < end:
            tl.store(figures + FINITE * count + row, stepped)
            row += 1
    tl.store(finite + operand, stepped != 0)
    if COUNTS:
        if end > begin:
            place = tl.load(rows + begin * COLUMNS + STEP).to(tl.pointer_type(tl.float32))
            tl.store(place, tl.load(place) + stepped)
