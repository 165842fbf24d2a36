"""Three steps of each rule, worked on paper with numbers that come out even."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from drive import run
from tolerances import ONE_STEP_FLOAT64

from thalweg.rules import LAMB, LARS, Adafactor, Kron

CLOSE = dict(rtol=ONE_STEP_FLOAT64, atol=ONE_STEP_FLOAT64)


def trajectory(rule: object, p: object, grads: list, lr: float | None) -> list:
    """The parameter after each step."""
    return [
        run(rule, np.array(p, float), [np.array(g, float) for g in grads[: t + 1]], lr=lr)[0] for t in range(len(grads))
    ]


def test_lars() -> None:
    # |p| = 5 and |g| = 10 at first. eta = 0.1, lr = 2, momentum 1/2.
    first, second, third = trajectory(LARS(momentum=0.5, trust_coefficient=0.1), [3.0, 4.0], [[6.0, 8.0]] * 3, lr=2.0)
    # ratio 0.1 * 5 / 10 = 0.05; b = 2 * 0.05 * g = (0.6, 0.8)
    np.testing.assert_allclose(first, [2.4, 3.2], **CLOSE)
    # |p| = 4: ratio 0.04; b = (0.3, 0.4) + 0.08 * g = (0.78, 1.04)
    np.testing.assert_allclose(second, [1.62, 2.16], **CLOSE)
    # |p| = 2.7: ratio 0.027; b = (0.39, 0.52) + 0.054 * g = (0.714, 0.952)
    np.testing.assert_allclose(third, [0.906, 1.208], **CLOSE)


def test_lars_with_decay_counts_it_in_the_ratio_and_in_the_step() -> None:
    # |p| = 5, |g| = 10, decay 2: ratio 0.1 * 5 / (10 + 2 * 5) = 0.025, step 2 * 0.025 * (g + 2 p) = 0.05 * (12, 16)
    rule = LARS(momentum=0.0, trust_coefficient=0.1, weight_decay=2.0)
    np.testing.assert_allclose(trajectory(rule, [3.0, 4.0], [[6.0, 8.0]], lr=2.0)[0], [2.4, 3.2], **CLOSE)


def test_lamb() -> None:
    # Equal gradients: after bias correction m = g and v = g^2, so u = g / (|g| + 1) with eps = 1.
    rule = LAMB(betas=(0.5, 0.75), eps=1.0)
    first, second, third = trajectory(rule, [3.0, 4.0], [[1.0, 3.0]] * 3, lr=0.5)
    u = np.array([1 / 2, 3 / 4])
    direction = u / math.hypot(*u)  # (2, 3) / sqrt(13)
    np.testing.assert_allclose(direction, np.array([2.0, 3.0]) / math.sqrt(13), **CLOSE)
    # each step has the length lr |p|
    np.testing.assert_allclose(first, np.array([3.0, 4.0]) - 2.5 * direction, **CLOSE)
    expected = first - 0.5 * np.linalg.norm(first) * direction
    np.testing.assert_allclose(second, expected, **CLOSE)
    np.testing.assert_allclose(third, expected - 0.5 * np.linalg.norm(expected) * direction, **CLOSE)


def test_lamb_moments_of_changing_gradients() -> None:
    # b1 = 1/2, b2 = 3/4, eps = 0, gradients 1, 3, -1 of a single weight 8, no trust ratio, lr 1.
    rule = LAMB(betas=(0.5, 0.75), eps=0.0, trust=False)
    first, second, third = trajectory(rule, [8.0], [[1.0], [3.0], [-1.0]], lr=1.0)
    # m: 1/2, 7/4, 3/8; v: 1/4, 39/16, 133/64
    # corrections: m / (1/2, 3/4, 7/8), v / (1/4, 7/16, 37/64)
    np.testing.assert_allclose(first, [8 - 1.0], **CLOSE)
    np.testing.assert_allclose(second, first - (7 / 3) / math.sqrt(39 / 7), **CLOSE)
    np.testing.assert_allclose(third, second - (3 / 7) / math.sqrt(133 / 37), **CLOSE)


def test_adafactor_factored() -> None:
    # g^2 = outer((1, 4), (1, 9)): rank one, so the factored estimate is exact and u = sign(g).
    g = [[1.0, 3.0], [2.0, 6.0]]
    rule = Adafactor(min_dim_size_to_factor=0, eps=(0.0, 1e-3), scale_parameter=False)
    first, second, third = trajectory(rule, [[5.0, 5.0], [5.0, 5.0]], [g, g, g], lr=0.5)
    for p, expected in ((first, 4.5), (second, 4.0), (third, 3.5)):
        np.testing.assert_allclose(p, np.full((2, 2), expected), **CLOSE)
    _, state = run(rule, np.full((2, 2), 5.0), [np.array(g)], lr=0.5)
    np.testing.assert_allclose(state["row_var"], [[5.0], [20.0]], **CLOSE)  # means of (1, 9) and (4, 36)
    np.testing.assert_allclose(state["col_var"], [[2.5, 22.5]], **CLOSE)  # means of (1, 4) and (9, 36)


def test_adafactor_clips_and_scales() -> None:
    # Weight 1 for new squares at t = 1, 2**-1 at t = 2 (beta2_decay = -1), 1/3 at t = 3.
    rule = Adafactor(beta2_decay=-1.0, eps=(0.0, 1e-3))
    first, second, third = trajectory(rule, [4.0], [[1.0], [3.0], [1.0]], lr=0.1)
    # v: 1, 5, 11/3. u: 1, 3/sqrt(5) clipped to 1, 1/sqrt(11/3). Steps are lr |p| u.
    np.testing.assert_allclose(first, [4 * 0.9], **CLOSE)
    np.testing.assert_allclose(second, [4 * 0.9 * 0.9], **CLOSE)
    np.testing.assert_allclose(third, [4 * 0.81 * (1 - 0.1 / math.sqrt(11 / 3))], **CLOSE)


def test_adafactor_relative_step() -> None:
    # No lr: min(1e-2, 1/sqrt(t)) times RMS(p) = 1e-2 |p| for a single weight.
    first, second, third = trajectory(Adafactor(eps=(0.0, 1e-3)), [2.0], [[5.0]] * 3, lr=None)
    np.testing.assert_allclose([first, second, third], [[2 * 0.99], [2 * 0.99**2], [2 * 0.99**3]], **CLOSE)


def polyak(**options: Any) -> Kron:
    bare = dict(precond_lr=0.5, clip=None, damping=0.0, relative_damping=0.0)
    return Kron(**{**Kron.VARIANTS["polyak"], **bare, **options})


def test_kron_on_a_vector() -> None:
    """One diagonal factor: P = q^2, c = 1, t_i = (q_i^2 g_i)^2, L = max t + 1 smoothed upwards."""
    rule = polyak(momentum=0.0, lipschitz_beta=0.5)
    first, second, third = trajectory(rule, [10.0, 10.0], [[2.0, 1.0]] * 3, lr=1.0)
    # q = 1: t = (4, 1), L = 5: gain 1 - 0.5/5 (t - 1) = (0.7, 1)
    q = np.array([0.7, 1.0])
    p = np.array([10.0, 10.0]) - q**2 * [2.0, 1.0]
    np.testing.assert_allclose(first, p, **CLOSE)
    # t = (0.98^2, 1) = (0.9604, 1), ell = 2, L = max(0.5 * 5 + 0.5 * 2, 2) = 3.5: gains (1 + 0.0396/7, 1)
    q = np.array([0.7 * (1 + 0.0396 / 7), 1.0])
    p = p - q**2 * [2.0, 1.0]
    np.testing.assert_allclose(second, p, **CLOSE)
    # ell = 2 again (the second entry stays at 1): L = 0.5 * 3.5 + 0.5 * 2 = 2.75
    t = (q[0] ** 2 * 2) ** 2
    q = np.array([q[0] * (1 - 0.5 / 2.75 * (t - 1)), 1.0])
    np.testing.assert_allclose(third, p - q**2 * [2.0, 1.0], **CLOSE)


def test_kron_on_a_diagonal_matrix() -> None:
    """Both factors stay diagonal and equal, so that dense arithmetic can be followed by hand."""
    rule = polyak(momentum=0.5, lipschitz_beta=0.0)
    p0, g = np.zeros((2, 2)), np.diag([2.0, 1.0])
    first, second, third = trajectory(rule, p0, [g, g, g], lr=1.0)
    # Q = 1, P g = g, T = diag(4, 1), c = N/n = 2, ell = 4 + 2: Q = 1 - 0.5/6 (T - 2) = diag(1 - 1/6, 1 + 1/12)
    q = np.array([5 / 6, 13 / 12])
    h = q**4 * [2.0, 1.0]  # both sides: P = q^2 from the left and from the right
    np.testing.assert_allclose(first, -np.diag(h), **CLOSE)
    buffer = h
    for p in (second, third):
        t = (q**4 * [2.0, 1.0]) ** 2
        q = q * (1 - 0.5 / (t.max() + 2) * (t - 2))
        buffer = 0.5 * buffer + q**4 * [2.0, 1.0]
        h = h + buffer
        np.testing.assert_allclose(p, -np.diag(h), **CLOSE)
