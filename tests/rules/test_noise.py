"""Random numbers by place: well distributed and independent.

tests/sharded and tests/optax/test_sharding.py have that parts of a tensor have the numbers of the whole.
"""

from __future__ import annotations

import numpy as np
import pytest

from thalweg.rules.noise import bits, normal, tensor_id
from thalweg.spaces import numpy as xp

LIKE = np.zeros((200, 500))
KEY = dict(seed=0, tensor=tensor_id("layer"), t=1)


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


def test_positions_beyond_32_bits_do_not_repeat() -> None:
    class Far:
        def positions(self, like: np.ndarray) -> tuple:
            low, high = xp.positions(like)
            return low, high + np.uint64(1)

        def word(self, n: int) -> int:
            return n

    near, far = (bits(space, LIKE, **KEY) for space in (xp, Far()))
    assert np.mean(near == far) < 1e-4
