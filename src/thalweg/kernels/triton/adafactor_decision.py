"""What both kinds of Adafactor share: from sums of squares to step sizes, and from u to new parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.kernels.triton.launching import kind_of
from thalweg.kernels.triton.numbers import is_finite
from thalweg.kernels.triton.passes import DECIDED, DTYPES, FINITE, Passes, Step, T, rate_of
from thalweg.kernels.triton.tables import Operand, step_number
from thalweg.rules import Adafactor
from thalweg.settings import Handling

POWER, OFFSET, LEAST_WEIGHT, EPS, EPS_OF_P, CLIP_THRESHOLD, WEIGHT_DECAY, GAIN = (tl.constexpr(c) for c in range(1, 9))
#: What u is multiplied by before it is averaged and after, what p is, and the share of new squares in their average.
INNER, OUTER, DECAY, WEIGHT, U_RMS, CLIP, P_RMS, ALPHA = (tl.constexpr(c) for c in range(2, 10))
#: How many elements the whole of each tensor has, and along its two factored axes.
ELEMENTS, ROWS_OF_WHOLE, COLUMNS_OF_WHOLE, COUNTS = (tl.constexpr(c) for c in range(4))


class AdafactorPasses(Passes):
    STATS: ClassVar = ("update_rms", "clip_factor", "param_rms", "step_size")
    FIGURES: ClassVar = ("inner", "outer", "decay", "weight", *STATS)
    rule: Adafactor

    def __init__(
        self, operands: Sequence[Operand], grads: Sequence[Tensor], rule: Adafactor, handling: Handling
    ) -> None:
        super().__init__(operands, grads, rule, handling)
        counts = [self.counts_of(operand) for operand in operands]
        by_row = [own for own, slices in zip(counts, self.tables.slices, strict=True) for _ in range(slices)]
        self.counts = self.uploads.table(torch.tensor(by_row, dtype=torch.float32).reshape(-1, COUNTS.value))

    def counts_of(self, operand: Operand) -> tuple[int, int, int]:
        """Of the whole parameter: a mean is that of all its parts. At least 1, so that a mean of nothing is 0."""
        whole, stacked = operand.shape or tuple(operand.p.shape), self.rule.stacked_axes
        axes = self.rule.factored_axes(whole)
        row, column = (1, 1) if axes is None else (whole[axes[0]], whole[axes[1]])
        return max(1, math.prod(whole[stacked:])), max(1, row), max(1, column)

    def numbers(self) -> tuple[float, ...]:
        rule = self.rule
        least = 0.0 if rule.beta2_cap is None else 1 - rule.beta2_cap
        gain = 1.0 if rule.momentum is None else 1 - rule.momentum
        clip = 1.0 if rule.clip_threshold is None else rule.clip_threshold
        return abs(rule.beta2_decay), rule.decay_offset, least, *rule.eps, clip, rule.weight_decay, gain

    def flags(self) -> dict[str, Any]:
        return dict(
            M_DTYPE=DTYPES[self.entry_dtypes[2]],
            AVERAGED=self.tables.operands[0].entries[2] is not None,
            CLAMP=self.rule.eps_mode == "clamp",
        )

    def decide_from(self, step: Step, p_squares: Tensor, u_squares: Tensor, g_squares: Tensor | None) -> None:
        """From totals, one for each tensor, to figures."""
        rule, lr, rows = self.rule, step.lr, self.tables.count
        relative, scaled = rule.is_relative(lr), rule.is_scaled(lr)
        if lr is None:
            lr = 1e-2 if relative else 1.0
        if not rows:
            return
        self.compiled.run(
            decide_kernel,
            (triton.cdiv(rows, DECIDED),),
            (
                self.tables.rows,
                self.options,
                self.counts,
                p_squares,
                u_squares,
                g_squares,
                self.figures,
                lr,
                step.lr_scale,
                rows,
            ),
            lambda: dict(
                SPACING=u_squares.stride(0),
                ALL_SQUARES=g_squares is not None,
                LR_IS_TENSOR=isinstance(lr, Tensor),
                RELATIVE=relative,
                WARMUP=relative and rule.warmup_init,
                SCALED_BY_P=bool(scaled),
                CLIPPED=rule.clip_threshold is not None,
                AFTER_LR=rule.momentum is None or rule.momentum_mode == "after_lr",
                DECAY_MODE=rule.weight_decay_mode,
                BLOCK=DECIDED,
            ),
            warps=4,
            key=(relative, scaled, kind_of(lr)),
        )


@triton.jit
def weight_of_squares(t, numbers):
    """The share of this step's squares in their average."""
    t = t - tl.load(numbers + OFFSET)
    weight = tl.exp(-tl.load(numbers + POWER) * tl.log(tl.where(t < 1.0, 1.0, t)))
    least = tl.load(numbers + LEAST_WEIGHT)
    return tl.where(weight < least, least, weight)


@triton.jit
def inverse_sqrt(x):
    """x**-1/2, and 0 at 0: what has never had a gradient does not move."""
    return 1.0 / tl.sqrt_rn(tl.where(x <= 0, float("inf"), x))


@triton.jit
def at_least(x, low):
    """The larger one; NaN stays."""
    return tl.where(x < low, low, x)


@triton.jit
def decide_kernel(
    rows,
    numbers,
    counts,
    p_squares,
    u_squares,
    g_squares,
    figures,
    lr,
    lr_scale,
    count,
    SPACING: tl.constexpr,
    ALL_SQUARES: tl.constexpr,
    LR_IS_TENSOR: tl.constexpr,
    RELATIVE: tl.constexpr,
    WARMUP: tl.constexpr,
    SCALED_BY_P: tl.constexpr,
    CLIPPED: tl.constexpr,
    AFTER_LR: tl.constexpr,
    DECAY_MODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The clip factor and the step size of every tensor, from its RMS and that of its u."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    elements = tl.load(counts + COUNTS * row + ELEMENTS, mask, other=1.0)
    p_square = tl.load(p_squares + SPACING * row, mask, other=0.0) / elements
    u_square = tl.load(u_squares + SPACING * row, mask, other=0.0) / elements
    p_rms, u_rms = tl.sqrt_rn(p_square), tl.sqrt_rn(u_square)
    t = step_number(rows, row, mask)

    clip = tl.full((BLOCK,), 1.0, tl.float32)
    if CLIPPED:
        clip = 1.0 / at_least(u_rms / tl.load(numbers + CLIP_THRESHOLD), 1.0)
    nominal = tl.zeros((BLOCK,), tl.float32) + rate_of(lr, 1.0, LR_IS_TENSOR)
    if WARMUP:
        nominal = 1e-6 * t
    alpha = nominal
    if RELATIVE:
        relative = 1.0 / tl.sqrt_rn(t)
        alpha = tl.where(relative < nominal, relative, nominal)
    if SCALED_BY_P:
        alpha = alpha * at_least(p_rms, tl.load(numbers + EPS_OF_P))
    alpha = alpha * lr_scale

    decay = tl.zeros((BLOCK,), tl.float32) + tl.load(numbers + WEIGHT_DECAY)
    if DECAY_MODE == "alpha":
        decay = decay * alpha
    elif DECAY_MODE == "lr":
        decay = decay * (nominal * lr_scale)
    inner, outer = clip, alpha
    if AFTER_LR:
        inner, outer = alpha * clip, tl.full((BLOCK,), 1.0, tl.float32)
    finite = is_finite(u_square)
    if ALL_SQUARES:  # squares that overflow make u 0 and would go unnoticed
        finite = is_finite(u_square + tl.load(g_squares + SPACING * row, mask, other=0.0) / elements)
    tl.store(figures + FINITE * count + row, tl.where(finite, 1.0, 0.0), mask)
    tl.store(figures + T * count + row, t, mask)
    tl.store(figures + INNER * count + row, inner, mask)
    tl.store(figures + OUTER * count + row, outer, mask)
    tl.store(figures + DECAY * count + row, decay, mask)
    tl.store(figures + WEIGHT * count + row, weight_of_squares(t, numbers), mask)
    tl.store(figures + U_RMS * count + row, u_rms, mask)
    tl.store(figures + CLIP * count + row, clip, mask)
    tl.store(figures + P_RMS * count + row, p_rms, mask)
    tl.store(figures + ALPHA * count + row, alpha, mask)
