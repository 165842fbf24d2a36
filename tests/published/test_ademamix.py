"""AdEMAMix equals its authors' code, and AdamW where nothing of the slow average is added."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from published_runs import STEPS, error, optax_peer, ours, peer, problem
from tolerances import FLOAT64

from thalweg.numpy import AdamW, AdEMAMix


def run_authors(
    params: list[Any],
    grads: list[list[Any]],
    *,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    alpha: float = 2.0,
    alpha_warmup: int | None = None,
    beta3_warmup: int | None = None,
    decay: float = 0.0,
    added: float = 1e-8,
) -> list[Any]:
    """As pytorch/ademamix.py of apple/ml-ademamix has it. added: to betas, before their half-lives are taken."""
    b1, b2, b3 = betas

    def half_life(beta: float) -> float:
        return math.log(0.5) / math.log(beta + added) - 1

    found = []
    for i, start in enumerate(params):
        p, m, slow, v = start.copy(), 0.0, 0.0, 0.0
        for t, step in enumerate(grads, 1):
            g, weight, now = step[i], alpha, b3
            if alpha_warmup is not None and t < alpha_warmup:
                weight = t / alpha_warmup * alpha
            if beta3_warmup is not None and t < beta3_warmup:
                a = t / beta3_warmup
                now = 0.5 ** (1 / ((1 - a) * half_life(b1) + a * half_life(b3) + 1))
            m, slow, v = b1 * m + (1 - b1) * g, now * slow + (1 - now) * g, b2 * v + (1 - b2) * g * g
            u = (m / (1 - b1**t) + weight * slow) / (np.sqrt(v) / math.sqrt(1 - b2**t) + 1e-8)
            p = p - 0.01 * (u + decay * p)
        found.append(p)
    return found


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        (dict(alpha_warmup=20, weight_decay=0.1), dict(alpha_warmup=20, decay=0.1)),
        (dict(betas=(0.8, 0.9, 0.99), alpha=8.0), dict(betas=(0.8, 0.9, 0.99), alpha=8.0)),
        (dict(beta3_warmup=20, alpha_warmup=25), dict(beta3_warmup=20, alpha_warmup=25, added=0.0)),
        (dict(beta3_warmup=3 * STEPS), dict(beta3_warmup=3 * STEPS, added=0.0)),
    ],
    ids=str,
)
def test_it_is_its_authors_code(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    params, grads = problem()
    mine = ours(AdEMAMix(lr=0.01, variant="apple", **options), params, grads)
    assert error(mine, run_authors(params, grads, **theirs), params) < FLOAT64


def test_half_lives_are_those_of_the_betas_themselves() -> None:
    """To which the authors' torch code adds 1e-8: at 0.9999 that is a ten-thousandth of the half-life."""
    params, grads = problem()
    mine = ours(AdEMAMix(lr=0.01, variant="apple", beta3_warmup=20), params, grads)
    assert error(mine, run_authors(params, grads, beta3_warmup=20), params) > FLOAT64


def test_schedules_of_optax_are_understood() -> None:
    contrib, jnp = peer("optax.contrib"), peer("jax.numpy")
    ademamix = pytest.importorskip("thalweg.optax").ademamix

    def alpha(count: Any) -> Any:
        return jnp.minimum(5.0, count / 4)

    def b3(count: Any) -> Any:
        return jnp.minimum(0.999, 0.9 + count / 200)

    params, grads = problem()
    theirs = optax_peer(contrib.ademamix(0.01, alpha=alpha, b3=b3), params, grads)
    assert error(optax_peer(ademamix(0.01, alpha=alpha, b3=b3), params, grads), theirs, params) < FLOAT64


def test_warm_ups_in_jax_are_those_of_numpy() -> None:
    peer("jax")
    ademamix = pytest.importorskip("thalweg.optax").ademamix
    params, grads = problem()
    options: dict[str, Any] = dict(alpha_warmup=20, beta3_warmup=12)
    mine = ours(AdEMAMix(lr=0.01, **options), params, grads)
    assert error(optax_peer(ademamix(0.01, **options), params, grads), mine, params) < FLOAT64


@pytest.mark.parametrize(
    ("options", "reached"),
    [
        (dict(momentum_dtype="bfloat16"), True),
        (dict(state_dtype="bfloat16", state_rounding="stochastic"), True),
        (dict(state_dtype="bfloat16"), False),  # as the page says
    ],
    ids=str,
)
def test_the_slow_average_in_sixteen_bits(options: dict[str, Any], reached: bool) -> None:
    """Under a steady gradient of 1 it is 1 - b3^t after t steps."""
    pytest.importorskip("ml_dtypes")
    optimizer, p, g = AdEMAMix(**options), np.ones(2000, np.float32), np.ones(2000, np.float32)
    for _ in range(500):
        optimizer.step({"p": p}, {"p": g})
    found = np.asarray(optimizer.state["p"]["exp_avg_slow"], np.float64).mean()
    wanted = 1 - 0.9999**500
    # stochastic rounding: the mean of 2000 walks of 500 roundings of less than 2**-8 of the average, four times over
    bound = 4 * 2.0**-8 * math.sqrt(500 / 2000)
    assert (abs(found / wanted - 1) < bound) == reached


def test_without_the_slow_average_it_is_adamw() -> None:
    params, grads = problem()
    mine = ours(AdEMAMix(lr=0.01, alpha=0.0, weight_decay=0.1), params, grads)
    assert error(mine, ours(AdamW(lr=0.01, weight_decay=0.1), params, grads), params) < FLOAT64
