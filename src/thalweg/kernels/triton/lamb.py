"""LAMB on GPUs.

40 bytes a parameter in float32: the first pass reads p, g and both moments and writes the moments (24), the second
reads p and the moments and writes p (16). State of 16 bits, or a guard, moves all writing to the second pass, which
then reads the gradient as well.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from thalweg.kernels.triton.numbers import as_stored, is_finite, one_minus_power
from thalweg.kernels.triton.passes import (
    DTYPES,
    FINITE,
    Passes,
    Step,
    T,
    as_parameter,
    bounded,
    failures_in,
    gradient_factor,
    is_allowed,
    is_idle,
    is_undefined,
    rate_of,
    turn,
)
from thalweg.kernels.triton.tables import COLUMNS, SIZE, STATE, P, address, loaded, pointer, step_number
from thalweg.rules import LAMB

B1, GAIN1, LOG_B1, B2, GAIN2, LOG_B2, EPS, EPS_ROOT, WEIGHT_DECAY = (tl.constexpr(c) for c in range(1, 10))
PHI_LOW, PHI_HIGH, TRUST_LOW, TRUST_HIGH = (tl.constexpr(c) for c in range(10, 14))
SCALE, DECAY, CORRECTION1, CORRECTION2, RATIO, P_NORM, U_NORM, G_NORM = (tl.constexpr(c) for c in range(2, 10))


class LambPasses(Passes):
    SUMS = 3
    STATS: ClassVar = ("trust_ratio", "param_norm", "update_norm", "grad_norm")
    FIGURES: ClassVar = ("scale", "decay", "correction1", "correction2", *STATS)
    rule: LAMB

    def numbers(self) -> tuple[float, ...]:
        rule, (b1, b2) = self.rule, self.rule.betas
        logs = [math.log(b) if b > 0 else -math.inf for b in rule.betas]
        gain = 1 - b1 if rule.grad_averaging else 1.0
        bounds = *(rule.phi or (0.0, 0.0)), *(rule.trust_clip or (0.0, 0.0))
        return b1, gain, logs[0], b2, 1 - b2, logs[1], rule.eps, rule.eps_root, rule.weight_decay, *bounds

    def flags(self) -> dict[str, Any]:
        m_dtype, v_dtype = self.entry_dtypes
        return dict(
            M_DTYPE=DTYPES[m_dtype],
            V_DTYPE=DTYPES[v_dtype],
            DECAY_MODE=self.rule.weight_decay_mode,
            CORRECTED=self.rule.bias_correction,
            # the second pass must find the moments as they are before they are rounded
            EARLY=not self.guarded and m_dtype == v_dtype == torch.float32,
        )

    def sweep(self, step: Step, stage: int) -> None:
        self.launch(sweep_kernel, step, stage)

    def decide(self, step: Step) -> None:
        rule = self.rule
        self.decided(
            decide_kernel,
            step,
            lambda: dict(
                DECOUPLED=rule.weight_decay_mode == "decoupled",
                CORRECTED=rule.bias_correction,
                ADAPTS=bool(rule.trust and (rule.always_adapt or rule.weight_decay != 0)),
                PHI=rule.phi is not None,
                TRUST_CLIP=rule.trust_clip is not None,
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
    V_DTYPE: tl.constexpr,
    DECAY_MODE: tl.constexpr,
    CORRECTED: tl.constexpr,
    EARLY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One chunk in one stage: sums of squares of p, u and g; a rehearsal of the step; the step."""
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
            m_place = address(rows, row, STATE, M_DTYPE, ALIGNED) + first + index
            v_place = address(rows, row, STATE + 1, V_DTYPE, ALIGNED) + first + index
            p = loaded(p_place, mask)
            m = loaded(m_place, mask)
            v = loaded(v_place, mask)

            weight_decay = tl.load(numbers + WEIGHT_DECAY)
            g = p
            if STAGE == 0 or not EARLY:
                g_place = pointer(tl.load(gradients + row), G_DTYPE, ALIGNED) + first + index
                g = loaded(g_place, mask) * gradient_factor(numbers, grad_scale, SCALED)
                if DECAY_MODE == "l2":
                    g = g + weight_decay * p
                m = tl.load(numbers + B1) * m + tl.load(numbers + GAIN1) * g
                v = tl.load(numbers + B2) * v + tl.load(numbers + GAIN2) * (g * g)

            correction1, correction2 = 1.0, 1.0
            if CORRECTED:
                if STAGE == 0:
                    t = step_number(rows, row)
                    correction1 = 1 / one_minus_power(tl.load(numbers + LOG_B1), t)
                    correction2 = 1 / one_minus_power(tl.load(numbers + LOG_B2), t)
                else:
                    correction1 = tl.load(figures + CORRECTION1 * count + row)
                    correction2 = tl.load(figures + CORRECTION2 * count + row)
            u = (m * correction1) / (tl.sqrt(v * correction2 + tl.load(numbers + EPS_ROOT)) + tl.load(numbers + EPS))
            if DECAY_MODE == "in_update":
                u = u + weight_decay * p

            if STAGE == 0:
                if mask is not None:
                    u = tl.where(mask, u, 0.0)
                tl.store(partials + chunk, tl.sum(p * p))
                tl.store(partials + chunk_count + chunk, tl.sum(u * u))
                tl.store(partials + 2 * chunk_count + chunk, tl.sum(g * g))
                if EARLY:
                    if is_allowed(allowed, ALLOWED):
                        tl.store(m_place, m, mask)
                        tl.store(v_place, v, mask)
            else:
                new = p + u * tl.load(figures + SCALE * count + row)
                if DECAY_MODE == "decoupled":
                    new = new - tl.load(figures + DECAY * count + row) * p
                stored = as_parameter(new, rows, row, first + index, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
                if STAGE == 1:
                    failures = failures_in(stored, mask)
                    if M_DTYPE == tl.float16:
                        failures += failures_in(m.to(M_DTYPE), mask)
                    if V_DTYPE == tl.float16:
                        failures += failures_in(v.to(V_DTYPE), mask)
                    tl.store(partials + chunk, failures)
                else:
                    tl.store(p_place, stored, mask)
                    if not EARLY:
                        tl.store(m_place, as_stored(m, 0.0, M_DTYPE, False), mask)
                        tl.store(v_place, as_stored(v, 0.0, V_DTYPE, False), mask)


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
    DECOUPLED: tl.constexpr,
    CORRECTED: tl.constexpr,
    ADAPTS: tl.constexpr,
    PHI: tl.constexpr,
    TRUST_CLIP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The trust ratio of every tensor, from its norms."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < count
    p_squares = tl.load(totals + 3 * row, mask, other=0.0)
    u_squares = tl.load(totals + 3 * row + 1, mask, other=0.0)
    g_squares = tl.load(totals + 3 * row + 2, mask, other=0.0)
    p_norm, u_norm = tl.sqrt_rn(p_squares), tl.sqrt_rn(u_squares)
    rate = rate_of(lr, lr_scale, LR_IS_TENSOR)
    decay = tl.zeros((BLOCK,), tl.float32) + rate * tl.load(numbers + WEIGHT_DECAY)
    measured = p_norm
    if DECOUPLED:  # the parameter is measured after its decay
        measured = tl.abs(1.0 - decay) * p_norm
    if PHI:
        measured = bounded(measured, tl.load(numbers + PHI_LOW), tl.load(numbers + PHI_HIGH))
    ratio = tl.full((BLOCK,), 1.0, tl.float32)
    if ADAPTS:
        undefined = is_undefined(measured, u_norm)
        ratio = tl.where(undefined, 1.0, measured / tl.where(undefined, 1.0, u_norm))
        if TRUST_CLIP:
            ratio = bounded(ratio, tl.load(numbers + TRUST_LOW), tl.load(numbers + TRUST_HIGH))
    t = step_number(rows, row, mask)
    correction1, correction2 = tl.full((BLOCK,), 1.0, tl.float32), tl.full((BLOCK,), 1.0, tl.float32)
    if CORRECTED:
        correction1 = 1 / one_minus_power(tl.load(numbers + LOG_B1), t)
        correction2 = 1 / one_minus_power(tl.load(numbers + LOG_B2), t)
    tl.store(figures + FINITE * count + row, tl.where(is_finite(u_squares + g_squares), 1.0, 0.0), mask)
    tl.store(figures + T * count + row, t, mask)
    tl.store(figures + SCALE * count + row, ratio * -rate, mask)
    tl.store(figures + DECAY * count + row, decay, mask)
    tl.store(figures + CORRECTION1 * count + row, correction1, mask)
    tl.store(figures + CORRECTION2 * count + row, correction2, mask)
    tl.store(figures + RATIO * count + row, ratio, mask)
    tl.store(figures + P_NORM * count + row, p_norm, mask)
    tl.store(figures + U_NORM * count + row, u_norm, mask)
    tl.store(figures + G_NORM * count + row, tl.sqrt_rn(g_squares), mask)
