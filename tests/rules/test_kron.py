"""Kron by hand and on average: it learns to whiten, keeps what it has learned, and pays off where that matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from day import BY_DAY
from drive import gradients, run
from tolerances import FLOAT64, MONTE_CARLO, ONE_STEP_FLOAT64

from thalweg.boundary import advance
from thalweg.numpy import Kron as KronOptimizer
from thalweg.rules import Kron
from thalweg.rules.factors import norm_bound
from thalweg.rules.refresh import expected_damping
from thalweg.settings import Numerics, ParameterOptions
from thalweg.spaces import numpy as xp
from thalweg.storage import first_state

GEOMETRIES = ["procrustes", "quad", "eq"]
M, N = 24, 16


def polyak(**options: Any) -> Kron:
    """With the first defaults, whose measurements are published."""
    return Kron(**{**Kron.VARIANTS["polyak"], **options})


#: Whitens raw gradients at every step, without anything after it.
BARE = dict(max_skew=None, precond_update_probability=1.0, momentum=0.0, clip=None)


# ---- three steps on paper


def trajectory(rule: Kron, p: Any, g: Any) -> list[Any]:
    """The parameter after each of three steps."""
    return [run(rule, np.array(p, float), [np.array(g, float)] * t, lr=1.0)[0] for t in (1, 2, 3)]


PAPER: dict[str, Any] = dict(precond_lr=0.5, clip=None, damping=0.0, relative_damping=0.0)
CLOSE = dict(rtol=ONE_STEP_FLOAT64, atol=ONE_STEP_FLOAT64)


def test_a_vector_by_hand() -> None:
    """One diagonal factor: P = q^2, c = 1, t_i = (q_i^2 g_i)^2, L = max t + 1 smoothed upwards."""
    first, second, third = trajectory(polyak(momentum=0.0, lipschitz_beta=0.5, **PAPER), [10.0, 10.0], [2.0, 1.0])
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


def test_a_diagonal_matrix_by_hand() -> None:
    """Both factors stay diagonal and equal, so that dense arithmetic can be followed by hand."""
    rule = polyak(momentum=0.5, lipschitz_beta=0.0, **PAPER)
    first, second, third = trajectory(rule, np.zeros((2, 2)), np.diag([2.0, 1.0]))
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


@pytest.mark.parametrize("shape", [(4, 7), (5,), ()], ids=str)
@pytest.mark.parametrize("options", [{}, dict(weight_decay=0.1, weight_decay_mode="gradient")], ids=str)
def test_normalized_gradients_are_divided_by_their_norms(shape: tuple[int, ...], options: Any) -> None:
    p, grads = gradients(shape, 8)
    grads = [g * 10.0**k for k, g in enumerate(grads, -4)]
    by_hand = [g / (np.linalg.norm(g) + 1e-6) for g in grads]
    found, _ = run(Kron(normalize_grads=True, **options), p, grads, lr=0.01)
    wanted, _ = run(Kron(**options), p, by_hand, lr=0.01)
    assert np.abs(found - wanted).max() < FLOAT64 * np.abs(wanted - p).max()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_gradient_whose_norm_is_not_finite_is_no_gradient_of_zeros(bad: float) -> None:
    optimizer = KronOptimizer(lr=0.01, normalize_grads=True, on_nonfinite="skip")
    p = np.ones((3, 3))
    optimizer.update("p", p, np.full((3, 3), bad))
    assert (p == 1).all()
    assert optimizer.skipped == {"p": 1}


# ---- on average


def learn(
    rule: Kron, grads: list, *, numerics: Numerics | None = None, state: Any = None, start: int = 0
) -> tuple[Any, list[float]]:
    """The state after some gradients, and RMS(P g) at each; annealed where precond_lr is a function."""
    numerics = numerics or Numerics()
    setting = ParameterOptions(rule, numerics)
    p = np.zeros(grads[0].shape, np.float32)
    s = first_state(xp, setting.rule_at(1), numerics, p) if state is None else state
    rms = []
    for t, g in enumerate(grads, start + 1):
        result = advance(
            xp, setting.rule_at(t), numerics, p, g.astype(np.float32), s, t=t, lr=1.0, lr_scale=1.0, tensor=0
        )
        s = result.state
        rms.append(float(np.ravel(result.stats["update_rms"])[0]))
    return s, rms


def covariance_roots(condition: float, seed: int = 0) -> tuple[Any, Any]:
    """Symmetric roots of a row and a column covariance, each of this condition and of mean 1."""
    rng = np.random.default_rng(seed)

    def root(n: int) -> Any:
        q, _ = np.linalg.qr(rng.standard_normal((n, n)))
        values = np.geomspace(1, condition, n)
        return (q * np.sqrt(values / values.mean())) @ q.T

    return root(M), root(N)


def coloured(steps: int, left: Any, right: Any, seed: int = 1) -> list:
    rng = np.random.default_rng(seed)
    return [left @ rng.standard_normal((M, N)) @ right for _ in range(steps)]


def whiteness_error(state: dict, left: Any, right: Any) -> float:
    """|P A P - 1| / sqrt(MN) for the covariance A of the gradients, P at its best scale."""
    p_left, p_right = (state[key].astype(np.float64).T @ state[key].astype(np.float64) for key in ("Q_0", "Q_1"))
    product = np.kron(p_left @ left @ left @ p_left, p_right @ right @ right @ p_right)
    scale = np.trace(product) / np.sum(product * product)
    return float(np.linalg.norm(scale * product - np.eye(M * N)) / np.sqrt(M * N))


def test_procrustes_learns_to_whiten_faster_than_the_triangular_group() -> None:
    left, right = covariance_roots(1e2)
    errors = {
        g: whiteness_error(learn(polyak(geometry=g, **BARE), coloured(100, left, right))[0], left, right)
        for g in GEOMETRIES
    }
    assert errors["procrustes"] < 0.45
    assert errors["quad"] < 0.5
    assert errors["eq"] > 1.5 * errors["procrustes"]


@pytest.mark.slow
@pytest.mark.skipif(BY_DAY, reason="it is thousands of steps: make test-all has them")
def test_annealed_it_whitens_as_published_measurements_have_it() -> None:
    """At condition 1e4 a side."""
    left, right = covariance_roots(1e4)
    rule = polyak(precond_lr=lambda t: 0.5 * 0.02 ** (t / 3000), **BARE)
    assert whiteness_error(learn(rule, coloured(3000, left, right))[0], left, right) < 0.23


def white(steps: int, scale: float = 1.0) -> list:
    return [scale * g for g in coloured(steps, np.eye(M), np.eye(N), 0)]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_it_recovers_from_a_drop_and_from_a_jump_of_scale(geometry: str) -> None:
    rule = polyak(geometry=geometry, **BARE)
    # smoothed norms slow the triangular group down: 0.04 instead of 0.97 after 100 steps
    quick = replace(rule, lipschitz_beta=0.0) if geometry == "eq" else rule
    state, _ = learn(quick, white(100))
    _, rms = learn(quick, white(100, 1e-4), state=state, start=100)
    assert rms[0] < 1e-3
    assert 0.5 < rms[-1] < 1.5
    state, _ = learn(rule, white(100))
    _, rms = learn(rule, white(250, 1e4), state=state, start=100)
    assert rms[0] > 1e3
    assert rms[199] < 6
    assert rms[-1] < 2.5


@pytest.mark.parametrize("scale", [1e-3, 1e3, None])
def test_it_recovers_from_a_bad_first_scale(scale: float | None) -> None:
    _, rms = learn(polyak(init_scale=scale, **BARE), white(300, 1e-2))
    assert 0.7 < rms[-1] < 1.2
    if scale is None:  # taken from the first gradient: right at once
        assert 0.5 < rms[0] < 1.5


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf, 1e30])
def test_factors_learn_nothing_from_zeros_and_from_what_is_not_finite(geometry: str, bad: float) -> None:
    rule = polyak(geometry=geometry, **BARE)
    state, _ = learn(rule, coloured(50, *covariance_roots(1e2)))
    gradient = np.zeros((M, N))
    gradient[3, 4] = bad
    with np.errstate(all="ignore"):
        after, _ = learn(rule, [gradient] * 20, state=state, start=50)
    assert all((after[key] == state[key]).all() for key in ("Q_0", "Q_1", "L_0", "L_1"))
    _, rms = learn(rule, coloured(5, *covariance_roots(1e2)), state=after, start=70)
    assert max(rms) < 5


def test_a_factor_of_zeros_takes_no_other_with_it() -> None:
    """All factors of a tensor get one largest entry, which a zero cannot have."""
    state, _ = learn(polyak(**BARE), coloured(5, *covariance_roots(1e2)))
    state = {**state, "Q_0": np.zeros_like(state["Q_0"])}
    with np.errstate(all="ignore"):
        after, _ = learn(polyak(**BARE), coloured(5, *covariance_roots(1e2)), state=state, start=5)
    assert all((after[key] == state[key]).all() for key in ("Q_0", "Q_1", "L_0", "L_1"))


@pytest.mark.slow
def test_factors_in_bfloat16_stay_positive_on_low_rank_gradients() -> None:
    pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, 2)), rng.standard_normal((2, N))
    grads = [a @ rng.standard_normal((2, 2)) @ b for _ in range(400)]
    state, rms = learn(polyak(**BARE), grads, numerics=Numerics(precond_dtype="bfloat16"))
    for key in ("Q_0", "Q_1"):
        q = state[key].astype(np.float64)
        assert np.linalg.eigvalsh((q + q.T) / 2).min() > 0
    assert max(rms) < 5


@pytest.mark.parametrize("scale", [1.0, 1e-15, 1e30])
@pytest.mark.parametrize("sign", [1, -1], ids=["symmetric", "skew"])
def test_a_norm_is_bounded_from_below_whatever_its_magnitude(sign: int, scale: float) -> None:
    x = np.random.default_rng(0).standard_normal((4, 15, 15)).astype(np.float32)
    x = (x + sign * np.swapaxes(x, 1, 2)) * np.float32(scale)
    whole = np.linalg.norm(x.astype(np.float64), 2, axis=(1, 2))
    bound = norm_bound(xp, x).reshape(-1).astype(np.float64)
    assert (bound <= whole * (1 + 1e-5)).all()
    assert (bound >= whole / 2).all()


class TestParts:
    def test_expected_damping_is_the_average_of_drawn_damping(self) -> None:
        rng = np.random.default_rng(0)
        factors = [rng.standard_normal((1, 3, 3)), rng.standard_normal((1, 4))]
        p = factors[0][0].T @ factors[0][0]
        drawn = p @ rng.standard_normal((20_000, 3, 4)) * factors[1][0] ** 2
        rows = np.einsum("kab,kcb->ac", drawn, drawn) / 20_000
        columns = np.einsum("kab,kab->b", drawn, drawn) / 20_000
        left, right = expected_damping(xp, [p[None], factors[1] ** 2], np.ones((1, 1, 1)))
        assert np.abs(left[0] - rows).max() < MONTE_CARLO * np.abs(rows).max()
        assert np.abs(right[0] - columns).max() < MONTE_CARLO * np.abs(columns).max()

    @pytest.mark.parametrize(
        ("shape", "options", "sizes", "diagonals"),
        [
            ((), {}, (1,), (True,)),
            ((7,), {}, (7,), (True,)),
            ((9, 9), {}, (9, 9), (False, False)),
            ((9, 4), {}, (9, 4), (True, False)),
            ((9, 4), dict(max_skew=None), (9, 4), (False, False)),
            ((9, 4), dict(max_skew=2.5), (9, 4), (False, False)),
            ((9, 4), dict(max_size_dense=8, max_skew=None), (9, 4), (True, False)),
            ((4096, 1), dict(max_skew=None, max_size_dense=None), (4096, 1), (False, True)),
            ((50257, 768), {}, (50257, 768), (True, False)),
            ((64, 32, 3, 3), {}, (64, 288), (False, True)),
            ((2, 3, 4), dict(merge=None, max_skew=None), (2, 3, 4), (False, False, False)),
            ((2, 1, 4), dict(merge="squeeze", max_skew=None), (2, 4), (False, False)),
            ((5, 64, 32), dict(stacked_axes=1), (64, 32), (True, False)),
            ((1, 1, 1), {}, (1,), (True,)),
        ],
    )
    def test_how_parameters_are_seen(self, shape: tuple, options: dict, sizes: tuple, diagonals: tuple) -> None:
        rule = Kron(**options)
        assert rule.sizes(shape) == sizes
        assert rule.diagonals(sizes) == diagonals

    @pytest.mark.parametrize(
        ("probability", "steps", "refreshes"),
        [(1.0, 10, 10), (0.1, 100, 10), (1 / 3, 99, 33), (0.4, 20, 8), (0, 50, 0)],
    )
    def test_refreshes_add_up_to_the_probability(self, probability: float, steps: int, refreshes: int) -> None:
        optimizer, count = KronOptimizer(lr=0.0, precond_update_probability=probability), 0
        for _ in range(steps):
            optimizer.update("p", np.ones((2, 2)), np.ones((2, 2)))
            count += optimizer.stats()["p"]["refreshed"]
        assert count == refreshes

    def test_the_default_schedule_anneals(self) -> None:
        schedule = Kron().precond_update_probability
        assert schedule.at(xp, 1) == schedule.at(xp, 501) == 1.0
        assert np.isclose(schedule.at(xp, 1501), np.exp(-1))
        assert schedule.at(xp, 10_000) == 0.03
