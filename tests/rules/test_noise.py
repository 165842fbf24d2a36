"""Random numbers by place: well distributed and independent.

tests/sharded and tests/optax/test_sharding.py have that parts of a tensor have the numbers of the whole.
"""

from __future__ import annotations

import numpy as np
import pytest
from tolerances import FLOAT64, SPACE

from thalweg.rules.noise import bits, chance, normal, tensor_id, uniform
from thalweg.spaces import numpy as xp

LIKE = np.zeros((200, 500))
KEY = dict(seed=0, tensor=tensor_id("layer"), t=1)


def test_uniform_fills_the_interval_evenly() -> None:
    u = uniform(xp, LIKE, **KEY).ravel()
    assert 0 < u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    chi_square = np.square(counts - 1000).sum() / 1000
    assert 60 < chi_square < 150  # 99 degrees of freedom


def test_normal_has_the_moments_of_a_normal() -> None:
    x = normal(xp, LIKE, **KEY).ravel()
    n = x.size
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(x**power) - moment) < 5 * np.sqrt(variance / n)


@pytest.mark.parametrize(
    "other",
    [dict(t=2), dict(t=1001), dict(seed=1), dict(tensor=tensor_id("other")), dict(tensor=tensor_id("layer") ^ 1)],
    ids=str,
)
def test_steps_seeds_and_tensors_are_independent(other: dict) -> None:
    x, y = normal(xp, LIKE, **KEY).ravel(), normal(xp, LIKE, **{**KEY, **other}).ravel()
    spread = 5 / np.sqrt(x.size)
    assert abs(np.mean(x * y)) < spread
    for shift in (1, 2, 500):  # nor is one the other, moved
        assert abs(np.mean(x[shift:] * y[:-shift])) < spread
        assert abs(np.mean(y[shift:] * y[:-shift])) < spread


def test_the_two_streams_are_independent() -> None:
    u, v = (uniform(xp, LIKE, **KEY, stream=stream).ravel() - 0.5 for stream in (0, 1))
    assert abs(np.mean(u * v)) < 5 / 12 / np.sqrt(u.size)


def test_two_chances_of_the_same_bits_are_independent_and_right_on_average() -> None:
    low, high = (chance(xp, LIKE, **KEY, stream=3, half=half).ravel() for half in (0, 1))
    assert abs(np.mean((low - 0.5) * (high - 0.5))) < 5 / 12 / np.sqrt(low.size)
    for draws in (low, high):
        counts = np.histogram(draws, bins=100, range=(0, 1))[0]
        assert 60 < np.square(counts - 1000).sum() / 1000 < 150  # 99 degrees of freedom
    assert (low * 2**17 % 2 == 1).all()


def test_positions_beyond_32_bits_do_not_repeat() -> None:
    class Far:
        def positions(self, like: np.ndarray) -> tuple:
            low, high = xp.positions(like)
            return low, high + np.uint64(1)

        def word(self, n: int) -> int:
            return n

    near, far = (bits(space, LIKE, **KEY) for space in (xp, Far()))
    assert np.mean(near == far) < 1e-4


def test_float32_and_float64_draw_the_same_numbers() -> None:
    wide, narrow = (normal(xp, np.zeros(1000, dtype), **KEY) for dtype in ("float64", "float32"))
    assert narrow.dtype == np.float32
    assert np.abs(wide - narrow).max() < SPACE["float32"]
    assert (uniform(xp, np.zeros(1000), **KEY) == uniform(xp, np.zeros(1000, np.float32), **KEY)).all()
    assert np.abs(wide).max() > FLOAT64
