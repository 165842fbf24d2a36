"""Adafactor with all squares. 32 bytes a parameter in float32: the first pass reads p, g and the squares (12), the
second reads them again and writes p and the squares (20).
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from thalweg.kernels.triton.adafactor_decision import (
    DECAY,
    EPS,
    GAIN,
    INNER,
    OUTER,
    WEIGHT,
    AdafactorPasses,
    at_least,
    inverse_sqrt,
    weight_of_squares,
)
from thalweg.kernels.triton.numbers import as_stored
from thalweg.kernels.triton.passes import DTYPES, Step, as_parameter, failures_in, gradient_factor, is_idle, turn
from thalweg.kernels.triton.tables import COLUMNS, SIZE, STATE, P, address, loaded, pointer, step_number


class PlainPasses(AdafactorPasses):
    SUMS = 3

    def flags(self) -> dict[str, Any]:
        return dict(V_DTYPE=DTYPES[self.entry_dtypes[0]], **super().flags())

    def sweep(self, step: Step, stage: int) -> None:
        self.launch(sweep_kernel, step, stage)

    def decide(self, step: Step) -> None:
        self.decide_from(step, self.totals, self.totals[:, 1:], self.totals[:, 2:])


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
    V_DTYPE: tl.constexpr,
    M_DTYPE: tl.constexpr,
    AVERAGED: tl.constexpr,
    CLAMP: tl.constexpr,
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
    eps = tl.load(numbers + EPS)
    if STAGE == 0:
        weight = weight_of_squares(step_number(rows, row), numbers)
    else:
        weight = tl.load(figures + WEIGHT * count + row)
    for RAGGED in tl.static_range(2):  # a chunk that is full needs no mask, and is read and written in wider pieces
        if (left < CHUNK) == (RAGGED == 1):
            mask = None
            if RAGGED:
                mask = index < left
            p_place = address(rows, row, P, P_DTYPE, ALIGNED) + first + index
            v_place = address(rows, row, STATE, V_DTYPE, ALIGNED) + first + index
            g_place = pointer(tl.load(gradients + row), G_DTYPE, ALIGNED) + first + index
            p, v = loaded(p_place, mask), loaded(v_place, mask)
            g = loaded(g_place, mask) * gradient_factor(numbers, grad_scale, SCALED)
            if CLAMP:
                v = (1.0 - weight) * v + weight * (g * g)
                u = g * (1.0 / at_least(tl.sqrt_rn(v), eps))
            else:
                v = (1.0 - weight) * v + weight * (g * g + eps)
                u = g * inverse_sqrt(v)
            if STAGE == 0:
                tl.store(partials + chunk, tl.sum(p * p))
                tl.store(partials + chunk_count + chunk, tl.sum(u * u))
                tl.store(partials + 2 * chunk_count + chunk, tl.sum(g * g))
            else:
                m_place = p_place
                m = u * tl.load(figures + INNER * count + row)
                if AVERAGED:
                    m_place = address(rows, row, STATE + 2, M_DTYPE, ALIGNED) + first + index
                    gain = tl.load(numbers + GAIN)
                    m = (1.0 - gain) * loaded(m_place, mask) + gain * m
                new = p - (m * tl.load(figures + OUTER * count + row) + tl.load(figures + DECAY * count + row) * p)
                stored = as_parameter(new, rows, row, first + index, figures, count, P_DTYPE, STOCHASTIC, SPREAD)
                if STAGE == 1:
                    failures = failures_in(stored, mask)
                    if V_DTYPE == tl.float16:
                        failures += failures_in(v.to(V_DTYPE), mask)
                    if AVERAGED and M_DTYPE == tl.float16:
                        failures += failures_in(m.to(M_DTYPE), mask)
                    tl.store(partials + chunk, failures)
                else:
                    tl.store(p_place, stored, mask)
                    tl.store(v_place, as_stored(v, 0.0, V_DTYPE, False), mask)
                    if AVERAGED:
                        tl.store(m_place, as_stored(m, 0.0, M_DTYPE, False), mask)
