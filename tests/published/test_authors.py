"""Rules equal the code of those who published them, written out here where no package has it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from published_runs import STEPS, added_early, error, ours, peer, problem, torch_peer
from tolerances import FLOAT64

import thalweg.numpy
from thalweg.numpy import LAMB, LARS, MARS, AdEMAMix, Muon

Arrays = list[Any]


# ---- AdEMAMix


def run_ademamix(
    params: Arrays,
    grads: list[Arrays],
    *,
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
    alpha: float = 2.0,
    alpha_warmup: int | None = None,
    beta3_warmup: int | None = None,
    decay: float = 0.0,
    added: float = 1e-8,
) -> Arrays:
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
def test_ademamix(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    params, grads = problem()
    mine = ours(AdEMAMix(lr=0.01, variant="apple", **options), params, grads)
    assert error(mine, run_ademamix(params, grads, **theirs), params) < FLOAT64


def test_half_lives_are_those_of_the_betas_themselves() -> None:
    """To which the authors' torch code adds 1e-8: at 0.9999 that is a ten-thousandth of the half-life."""
    params, grads = problem()
    mine = ours(AdEMAMix(lr=0.01, variant="apple", beta3_warmup=20), params, grads)
    assert error(mine, run_ademamix(params, grads, beta3_warmup=20), params) > FLOAT64


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


# ---- MARS


def small_problem() -> tuple[Arrays, list[Arrays]]:
    """Gradients whose norms, corrected or not, are on either side of 1."""
    params, grads = problem()
    return params, [[g * (1.0 + t % 8) / (4 * np.linalg.norm(g)) for g in step] for t, step in enumerate(grads)]


def run_mars(
    params: Arrays,
    grads: list[Arrays],
    *,
    betas: tuple[float, float] = (0.95, 0.99),
    gamma: float = 0.025,
    decay: float = 0.0,
    amsgrad: bool = False,
) -> tuple[Arrays, set[bool]]:
    """As mars.py of AGI-Arena/MARS has it, with optimize_1d; and whether gradients were clipped."""
    (b1, b2), found, clipped = betas, [], set()
    for i, start in enumerate(params):
        p, m, v, largest, last = start.copy(), 0.0, 0.0, 0.0, np.zeros_like(start)
        for t, step in enumerate(grads, 1):
            g = step[i]
            c = (g - last) * (gamma * (b1 / (1 - b1))) + g
            norm = np.linalg.norm(c)
            clipped.add(bool(norm > 1))
            c, last = c / norm if norm > 1 else c, g
            m, v = b1 * m + (1 - b1) * c, b2 * v + (1 - b2) * c * c
            largest = np.maximum(largest, v)
            root = np.sqrt(largest if amsgrad else v)
            p = p - 0.01 * (decay * p + m / ((root / np.sqrt(1 - b2**t) + 1e-8) * (1 - b1**t)))
        found.append(p)
    return found, clipped


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, {}),
        (dict(gamma=0.1, weight_decay=0.1), dict(gamma=0.1, decay=0.1)),
        (dict(betas=(0.9, 0.95), amsgrad=True), dict(betas=(0.9, 0.95), amsgrad=True)),
    ],
    ids=str,
)
def test_mars(options: dict[str, Any], theirs: dict[str, Any]) -> None:
    params, grads = small_problem()
    wanted, clipped = run_mars(params, grads, **theirs)
    assert clipped == {True, False}
    assert error(ours(MARS(lr=0.01, **options), params, grads), wanted, params) < FLOAT64


def test_vectors_by_adamw_are_a_mixture() -> None:
    peers = peer("pytorch_optimizer")
    import thalweg.torch

    def mixture(params: Arrays) -> Any:
        entries = [
            (lambda name, p: p.ndim > 1, thalweg.torch.MARS.options(lr=0.01)),
            ("*", thalweg.torch.AdamW.options(lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)),
        ]
        return thalweg.torch.Mixture([(f"p{i}", p) for i, p in enumerate(params)], entries)

    def add_early(optimizer: Any, t: int) -> None:
        for group in optimizer.param_groups:
            for name, value in added_early(group["betas"][1]).items():
                group[name] = value(t)

    params, grads = small_problem()
    theirs = torch_peer(lambda p: peers.MARS(p, lr=0.01, lr_1d=0.02), params, grads)
    assert error(torch_peer(mixture, params, grads, before=add_early), theirs, params) < FLOAT64


def test_squares_that_overflow_are_not_finite() -> None:
    """Their norm would clip a gradient to nothing."""
    p, optimizer = np.ones(3, np.float32), MARS(on_nonfinite="skip")
    optimizer.step({"p": p}, {"p": np.full(3, 0.1, np.float32)})
    before, state = p.copy(), {key: value.copy() for key, value in optimizer.state["p"].items()}
    optimizer.step({"p": p}, {"p": np.full(3, 1e30, np.float32)})
    assert (p == before).all()
    assert all((optimizer.state["p"][key] == value).all() for key, value in state.items() if key != "step")


def test_figures() -> None:
    p, optimizer = np.ones(4), MARS(gamma=0.1, betas=(0.5, 0.9))
    optimizer.step({"p": p}, {"p": np.full(4, 1.0)})
    found = optimizer.stats()["p"]
    assert (found["grad_norm"], found["corrected_norm"]) == (2.0, pytest.approx(2.2))


# ---- LARC, LAMB of apex, Muon


def run_larc(params: Arrays, grads: list[Arrays], lr: float) -> Arrays:
    """LARC around SGD, from its equations: rate min(0.02 |p| / (|g| + decay |p| + 1e-8) / lr, 1)."""
    params, buffers, decay = list(params), [np.zeros_like(p) for p in params], 0.1
    for step in grads:
        for i, g in enumerate(step):
            p = params[i]
            w, n = np.linalg.norm(p), np.linalg.norm(g)
            rate = min(0.02 * w / (n + decay * w + 1e-8) / lr, 1.0)
            buffers[i] = 0.9 * buffers[i] + rate * (g + decay * p)
            params[i] = p - lr * buffers[i]
    return params


@pytest.mark.parametrize("lr", [1e-3, 0.5], ids=["rate clipped", "rate free"])
def test_larc(lr: float) -> None:
    params, grads = problem()
    mine = ours(LARS(lr=lr, variant="larc", weight_decay=0.1), params, grads)
    assert error(mine, run_larc(params, grads, lr), params) < FLOAT64


def test_lamb_of_apex_with_l2() -> None:
    """The equations of apex's multi_tensor_lamb.cu, in our own words, with its defaults."""
    b1, b2, eps, decay, lr = 0.9, 0.999, 1e-6, 0.01, 0.01
    params, grads = problem()
    current, averages = list(params), [(np.zeros_like(p), np.zeros_like(p)) for p in params]
    for t, step in enumerate(grads, 1):
        norm = np.sqrt(sum((g * g).sum() for g in step))
        for i, p in enumerate(current):
            g = step[i] / max(1.0, norm) + decay * p
            m, v = averages[i]
            averages[i] = m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
            u = m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps)
            current[i] = p - lr * np.linalg.norm(p) / np.linalg.norm(u) * u
    mine = ours(LAMB(lr=lr, variant="apex", weight_decay_mode="l2"), params, grads)
    assert error(mine, current, params) < FLOAT64


def step_muon(p: Any, g: Any, buffer: Any, *, lr: float, decay: float, summed: bool, matched: bool) -> Any:
    """The equations of KellerJordan/Muon, and of MoonshotAI/Moonlight (summed, matched), in our own words."""
    if summed:
        buffer[...] = 0.95 * buffer + g
        x = g + 0.95 * buffer
    else:
        buffer[...] = buffer + 0.05 * (g - buffer)
        x = g + 0.95 * (buffer - g)
    x = x.reshape(len(x), -1)
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    x = (x.T if rows > columns else x).reshape(p.shape)
    scale = 0.2 * max(rows, columns) ** 0.5 if matched else max(1, rows / columns) ** 0.5
    return p * (1 - lr * decay) - lr * scale * x


@pytest.mark.parametrize(
    ("variant", "own"), [("original", {}), ("moonlight", dict(decay=0.1, summed=True, matched=True))]
)
def test_muon(variant: str, own: dict[str, Any]) -> None:
    params, grads = problem([(24, 40), (40, 24), (16, 16), (1, 30), (6, 2, 3, 3)])
    current, buffers = list(params), [np.zeros_like(p) for p in params]
    given = {"lr": 0.02, "decay": 0.0, "summed": False, "matched": False, **own}
    for step in grads:
        current = [step_muon(p, g, b, **given) for p, g, b in zip(current, step, buffers, strict=True)]
    assert error(ours(Muon(lr=0.02, variant=variant, ns_dtype=None), params, grads), current, params) < FLOAT64


# ---- schedule-free training


@pytest.mark.parametrize(
    ("theirs", "rule", "options", "published"),
    [
        ("SGDScheduleFree", "SGD", dict(weight_decay=0.1), dict(weight_decay=0.1)),
        ("SGDScheduleFree", "SGD", dict(schedule_free=0.7), dict(momentum=0.7)),
        ("AdamWScheduleFree", "AdamW", dict(betas=(0.0, 0.99), weight_decay=0.1), dict(weight_decay=0.1)),
        ("AdamWScheduleFree", "AdamW", dict(betas=(0.0, 0.99), schedule_free_warmup=6), dict(warmup_steps=6)),
    ],
)
def test_schedule_free(theirs: str, rule: str, options: dict[str, Any], published: dict[str, Any]) -> None:
    make = getattr(peer("schedulefree"), theirs)
    betas = dict(betas=(0.9, 0.99)) if rule == "AdamW" else {}
    params, grads = problem()

    def run(after: Any) -> Arrays:
        given = dict(before=lambda optimizer, t: optimizer.train(), after=after)
        return torch_peer(lambda p: make(p, lr=0.05, **betas, **published), params, grads, **given)

    options = {"schedule_free": True, "weight_decay": 0.0, **options}
    optimizer = getattr(thalweg.numpy, rule)(lr=0.05, engine="reference", **options)
    mine = ours(optimizer, params, grads)
    assert error(mine, run(None), params) < FLOAT64
    with optimizer.averaged({f"p{i}": p for i, p in enumerate(mine)}):
        assert error(mine, run(lambda optimizer: optimizer.eval()), params) < FLOAT64
