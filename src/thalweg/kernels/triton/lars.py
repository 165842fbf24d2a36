"""LARS on GPUs.

28 bytes a parameter in float32: the first pass reads p and g (8), the second reads p, g and the momentum and writes p
and the momentum (20).
"""

from __future__ import annotations

from typing import Any, ClassVar

import triton
import triton.language as tl

from thalweg.kernels.triton.numbers import as_stored, is_finite
from thalweg.kernels.triton.passes import (
    DTYPES,
    FINITE,
    Passes,
    Step,
    T,
    as_parameter,
    failures_in,
    gradient_factor,
    is_idle,
    is_undefined,
    rate_of,
    turn,
)
from thalweg.kernels.triton.tables import COLUMNS, SIZE, STATE, P, address, loaded, pointer, step_number
from thalweg.rules import LARS

MOMENTUM, WEIGHT_DECAY, TRUST_COEFFICIENT, EPS, ZERO_RATIO = (tl.constexpr(c) for c in range(1, 6))
#: What the gradient is scaled by, and then its average.
INNER, OUTER, RATIO, P_NORM, G_NORM = (tl.constexpr(c) for c in range(2, 7))


class LarsPasses(Passes):
    SUMS = 2
    STATS: ClassVar = ("trust_ratio", "param_norm", "grad_norm")
    FIGURES: ClassVar = ("inner", "outer", *STATS)
    rule: LARS

    def numbers(self) -> tuple[float, ...]:
        rule = self.rule
        zero_ratio = rule.trust_coefficient if isinstance(rule.zero_ratio, str) else rule.zero_ratio
        return rule.momentum, rule.weight_decay, rule.trust_coefficient, rule.eps, zero_ratio

    def flags(self) -> dict[str, Any]:
        return dict(
            M_DTYPE=DTYPES[self.entry_dtypes[0]],
            AVERAGED=self.tables.operands[0].entries[0] is not None,
            NESTEROV=self.rule.nesterov,
            COMBINED=self.rule.norm_mode == "combined",
        )

    def sweep(self, step: Step, stage: int) -> None:
        self.launch(sweep_kernel, step, stage)

    def decide(self, step: Step) -> None:
        rule = self.rule
        self.decided(
            decide_kernel,
            step,
            lambda: dict(
                LR_INSIDE=rule.momentum_mode == "lr_inside",
                ADAPTS=bool(rule.trust and (rule.always_adapt or rule.weight_decay != 0)),
                COMBINED=rule.norm_mode == "combined",
                CLIP=rule.clip,
            ),
        )


@triton.jit
def sweep_kernel(
    rows,
    gradients,
    chunks,
    numbers,
    figures,
    partials,
    grad_scale,
    allowed,
    count,
    chunk_count,
    STAGE: tl.constexpr,
    SCALED: tl.constexpr,
    ALLOWED: tl.constexpr,
    GUARDED: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    SPREAD: tl.constexpr,
    ALIGNED: tl.constexpr,
    P_DTYPE: tl.constexpr,
    G_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    AVERAGED: tl.constexpr,
    NESTEROV: tl.constexpr,
    COMBINED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk in one stage: sums of squares of p and g; a rehearsal of the step; the step."""
    chunk = turn(chunk_count, STAGE, GUARDED)
    row = tl.load(chunks + 2 * chunk)
    if is_idle(figures, row, allowed, count, STAGE, ALLOWED, GUARDED):
        return
    first = tl.load(chunks + 2 * chunk + 1).to(tl.int64) * CHUNK
    left = tl.load(rows + row * COLUMNS + SIZE) - first
    index = tl.arange(0, CHUNK)
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            mask = None
            if RAGGED:
                mask = index < left
            p_place = address(rows, row, P, P_DTYPE, ALIGNED) + first + index
            g_place = pointer(tl.load(gradients + row), G_DTYPE, ALIGNED) + first + index
            p = loaded(p_place, mask)
            g = loaded(g_place, mask) * gradient_factor(numbers, grad_scale, SCALED)
            decayed = g + tl.load(numbers + WEIGHT_DECAY) * p
            if STAGE == 0:
                measured = g
                if COMBINED:
                    measured = decayed
                tl.store(partials + chunk, tl.sum(p * p))
                tl.store(partials + chunk_count + chunk, tl.sum(measured * measured))
            else:
                step = decayed * tl.load(figures + INNER * count + row)
                m_place = p_place
                buffer = step
                if AVERAGED:
                    m_place = address(rows, row, STATE, M_DTYPE, ALIGNED) + first + index
                    momentum = tl.load(numbers + MOMENTUM)
                    buffer = momentum * loaded(m_place, mask) + step
                    if NESTEROV:
                        step = step + momentum * buffer
                    else:
                        step = buffer
                new = p + step * tl.load(figures + OUTER * count + row)
                stored = as_parameter(new, rows, row, first + index, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
                if STAGE == 1:
                    failures = failures_in(stored, mask)
                    if AVERAGED and M_DTYPE == tl.float16:
                        failures += failures_in(buffer.to(M_DTYPE), mask)
                    tl.store(partials + chunk, failures)
                else:
                    tl.store(p_place, stored, mask)
                    if AVERAGED:
                        tl.store(m_place, as_stored(buffer, 0.0, M_DTYPE, False), mask)


@triton.jit
def decide_kernel(
    rows,
    numbers,
    totals,
    figures,
    lr,
    lr_scale,
    count,
    LR_IS_TENSOR: tl.constexpr,
    LR_INSIDE: tl.constexpr,
    ADAPTS: tl.constexpr,
    COMBINED: tl.constexpr,
    CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The trust ratio of every tensor, from its norms."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    p_norm = tl.sqrt_rn(tl.load(totals + 2 * row, mask, other=0.0))
    g_squares = tl.load(totals + 2 * row + 1, mask, other=0.0)
    g_norm = tl.sqrt_rn(g_squares)
    rate = tl.zeros((BLOCK,), tl.float32) + rate_of(lr, lr_scale, LR_IS_TENSOR)
    ratio = tl.full((BLOCK,), 1.0, tl.float32)
    if ADAPTS:
        above, below = tl.load(numbers + TRUST_COEFFICIENT) * p_norm, g_norm + tl.load(numbers + EPS)
        if not COMBINED:
            below = below + tl.load(numbers + WEIGHT_DECAY) * p_norm
        undefined = is_undefined(p_norm, g_norm)
        if CLIP:  # min(ratio / lr, 1), with no division by an lr of 0
            limit = rate * below
            above = tl.where((above < limit) | (above != above), above, limit)
            below = limit
            undefined = undefined | ((rate <= 0) & (p_norm == p_norm) & (g_norm == g_norm))
        ratio = tl.where(undefined, tl.load(numbers + ZERO_RATIO), above / tl.where(undefined, 1.0, below))
    one = tl.full((BLOCK,), 1.0, tl.float32)
    inner, outer = ratio, -rate
    if LR_INSIDE:
        inner, outer = ratio * rate, -one
    tl.store(figures + FINITE * count + row, tl.where(is_finite(g_squares), 1.0, 0.0), mask)
    tl.store(figures + T * count + row, step_number(rows, row, mask), mask)
    tl.store(figures + INNER * count + row, inner, mask)
    tl.store(figures + OUTER * count + row, outer, mask)
    tl.store(figures + RATIO * count + row, ratio, mask)
    tl.store(figures + P_NORM * count + row, p_norm, mask)
    tl.store(figures + G_NORM * count + row, g_norm, mask)
