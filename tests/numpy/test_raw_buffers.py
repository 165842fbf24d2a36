"""Buffers of float32 that are stepped by name: a shape that nobody has told exempts nothing from the published rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT32

from thalweg.numpy import LAMB, LARS, Adafactor, Kron, Mixture

SIZE, STEPS = 12, 3
Formula = Callable[[np.ndarray, list[np.ndarray]], np.ndarray]


def norm(x: Any) -> float:
    return float(np.linalg.norm(x))


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def lamb(p: Any, grads: list[Any], *, decay: float = 0.1) -> Any:
    """You and others 2020: the ratio of two norms, with decay in what is measured."""
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6) + decay * p
        p = p - 0.02 * norm(p) / norm(u) * u
    return p


def lars(p: Any, grads: list[Any]) -> Any:
    """You and others 2017: momentum of steps, each at a rate of its own."""
    buffer = np.zeros_like(p)
    for g in grads:
        rate = 2.0 * 0.001 * norm(p) / (norm(g) + 0.1 * norm(p))
        buffer = 0.9 * buffer + rate * (g + 0.1 * p)
        p = p - buffer
    return p


def adafactor(p: Any, grads: list[Any]) -> Any:
    """Shazeer and Stern 2018: no rate is given, and squares are kept whole."""
    v = np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        decay = 1 - t**-0.8
        v = decay * v + (1 - decay) * (g * g + 1e-30)
        u = g / np.sqrt(v)
        p = p - min(1e-2, t**-0.5) * max(1e-3, rms(p)) * u / max(1.0, rms(u))
    return p


def factored(p: Any, grads: list[Any]) -> Any:
    """The same, for what is a matrix of three rows: sums of squares by row and by column."""
    rows, columns = np.zeros((3, 1)), np.zeros((1, 4))
    for t, flat in enumerate(grads, 1):
        g, decay = flat.reshape(3, 4), 1 - t**-0.8
        rows = decay * rows + (1 - decay) * (g * g + 1e-30).mean(1, keepdims=True)
        columns = decay * columns + (1 - decay) * (g * g + 1e-30).mean(0, keepdims=True)
        u = (g / np.sqrt(rows / rows.mean() * columns)).ravel()
        p = p - min(1e-2, t**-0.5) * max(1e-3, rms(p)) * u / max(1.0, rms(u))
    return p


def kron(p: Any, grads: list[Any]) -> Any:
    """Li 2024: a diagonal factor that learns to whiten, updates within 1, and the heavy ball."""
    q, bound, buffer = np.ones_like(p), 0.0, np.zeros_like(p)
    for g in grads:
        g = g + 0.1 * p
        squares = (q * q * g) ** 2
        now = squares.max() + 1
        bound = max(0.9 * bound + 0.1 * now, now)
        q = q * (1 - 0.1 / bound * (squares - 1))
        buffer = 0.9 * buffer + np.clip(q * q * g, -1, 1)
        p = p - 0.02 * buffer
    return p


#: What is constructed, the shape that is told, and the published formula.
FIRST: dict[str, tuple[Any, tuple[int, ...] | None, Formula]] = {
    "LAMB": (LAMB(0.02, weight_decay=0.1), None, lamb),
    "LAMB as a matrix": (LAMB(0.02, weight_decay=0.1), (3, 4), lamb),
    "LARS": (LARS(2.0, weight_decay=0.1), None, lars),
    "LARS, vectors exempt": (LARS(2.0, weight_decay=0.1, exempt="vectors"), None, lars),
    "Adafactor": (Adafactor(variant="paper"), (SIZE,), adafactor),
    "Adafactor as a matrix": (Adafactor(variant="paper"), (3, 4), factored),
    "Kron": (Kron(0.02, variant="polyak", weight_decay=0.1), (SIZE,), kron),
}


def numbers() -> tuple[np.ndarray, list[np.ndarray]]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(SIZE), [rng.standard_normal(SIZE) * (1 + t) for t in range(STEPS)]


def stepped(optimizer: Any, shape: tuple[int, ...] | None) -> np.ndarray:
    p, grads = numbers()
    weights, optimizer = p.astype(np.float32), optimizer.copy()
    for g in grads:
        optimizer.update("layer", weights, g.astype(np.float32), shape=shape)
        optimizer.end_iteration()
    return weights


def is_near(found: Any, wanted: Any) -> bool:
    return bool(np.abs(found - wanted).max() <= FLOAT32 * np.abs(wanted - numbers()[0]).max())


@pytest.mark.parametrize("case", FIRST)
def test_a_buffer_is_stepped_by_the_published_formula(case: str) -> None:
    optimizer, shape, formula = FIRST[case]
    assert is_near(stepped(optimizer, shape), formula(*numbers()))


def without_ratio(p: Any, grads: list[Any]) -> Any:
    m = v = np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        p = p - 0.02 * m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-6)
    return p


def test_a_vector_is_one_that_was_declared() -> None:
    """With a shape, or as an array of a whole model: there it is a bias, and stepped as Adam steps it."""
    optimizer, wanted = LAMB(0.02, weight_decay=0.1), without_ratio(*numbers())
    assert is_near(stepped(optimizer, (SIZE,)), wanted)
    p, grads = numbers()
    model = {"layer": p.astype(np.float32)}
    for g in grads:
        optimizer.step(model, {"layer": g.astype(np.float32)})
    assert is_near(model["layer"], wanted)


def test_a_shape_that_is_told_later_counts_from_then_on() -> None:
    optimizer, weights = LAMB(0.1), np.full(4, 8.0)
    optimizer.update("layer", weights, np.ones(4))
    assert optimizer.stats()["layer"]["trust_ratio"] == pytest.approx(8.0)
    optimizer.update("layer", weights, np.ones(4), shape=(4,))
    assert optimizer.stats()["layer"]["trust_ratio"] == 1.0


def test_what_overrides_say_of_a_buffer_by_name_holds() -> None:
    exempt = LAMB(0.02, weight_decay=0.1, overrides=[("layer", dict(trust=False, weight_decay=0.0))])
    assert is_near(stepped(exempt, None), without_ratio(*numbers()))


def test_a_mixture_has_the_same_rule() -> None:
    assert is_near(stepped(Mixture([("*", LAMB.options(lr=0.02, weight_decay=0.1))]), None), lamb(*numbers()))
