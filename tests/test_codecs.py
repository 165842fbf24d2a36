"""Dtypes, and numbers in eight bits: how far codes are from what they stand for. tests/engines has other libraries."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from thalweg.codecs import CODECS, Grouping, grouping
from thalweg.rules import LAMB
from thalweg.settings import Numerics
from thalweg.spaces import numpy as xp
from thalweg.storage import first_state

GROUPS = Grouping(1, 64)


def numbers(seed: int = 0) -> Any:
    """Groups of all magnitudes, from within which numbers differ by as much."""
    rng = np.random.default_rng(seed)
    own, of_group = rng.standard_normal((32, 128)), rng.uniform(-40, 40, (32, 1))
    return (own * np.exp2(rng.uniform(-12, 0, (32, 128)) + of_group)).astype("float32")


def coded(name: str, x: Any, chance: Any = None) -> tuple[Any, Any, Any]:
    with np.errstate(all="ignore"):
        codes, scales = CODECS[name].encode(xp, x, GROUPS, chance)
        return codes, scales, CODECS[name].decode(xp, codes, scales, GROUPS)


def test_numbers_with_a_sign_are_within_half_a_step() -> None:
    x = numbers()
    codes, scales, found = coded("int8", x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == ("int8", (32, 128), "float32", (32, 2))
    step = (np.abs(x) + np.repeat(scales, 64, 1)) / 16
    assert (np.abs(found - x) <= step * 0.5001).all()
    assert (np.sign(found) * np.sign(x) >= 0).all()


def test_squares_are_within_half_a_step_and_never_0() -> None:
    x = np.square(numbers(), dtype="float32")
    codes, scales, found = coded("uint8", x)
    assert codes.dtype == "uint8"
    largest = np.repeat(scales, 64, 1)
    within = x > largest * 2.0**-19
    assert within.mean() > 0.6
    assert (np.abs(found / x - 1)[within] <= 5 / 128).all()
    assert (found > 0).all()
    assert (found[~within] <= largest[~within] * 2.0**-18.5).all()
    assert np.array_equal(scales, x.reshape(32, 2, 64).max(-1))


@pytest.mark.parametrize("name", CODECS)
def test_every_code_stands_for_a_number_that_has_that_code(name: str) -> None:
    codec = CODECS[name]
    least = -codec.most if codec.signed else 0
    every = np.resize(np.arange(least, codec.most + 1), (8, 64)).astype(name)
    every[:, 0] = codec.most
    found = codec.decode(xp, every, np.full((8, 1), 3.7, "float32"), GROUPS)
    assert np.array_equal(coded(name, found)[0], every)
    assert (np.diff(found.ravel()[np.argsort(every.ravel(), kind="stable")]) >= 0).all()


@pytest.mark.parametrize("name", CODECS)
def test_zeros_tiny_numbers_and_what_is_not_finite(name: str) -> None:
    x = np.abs(numbers())
    x[0, :64], x[0, 64:], x[1, 3], x[2, 70] = 0, 1e-33, np.inf, np.nan
    codes, scales, found = coded(name, x)
    assert not found[0].any()
    assert not scales[0].any()
    assert not codes[0].any()
    assert not np.isfinite(found[1, :64]).any()
    assert np.isfinite(found[1, 64:]).all()
    assert np.isnan(found[2, 64:]).all()
    assert np.isfinite(found[2, :64]).all()


@pytest.mark.parametrize("name", CODECS)
def test_rounding_at_random_is_right_on_average(name: str) -> None:
    x = np.full((1000, 64), 0.3, "float32") * np.linspace(0.5, 1, 64, dtype="float32")
    chance = np.random.default_rng(0).random(x.shape, "float32")
    found = coded(name, x, chance=chance)[2]
    assert np.abs(found.mean(0) / x[0] - 1).max() < 8e-3  # a step across octaves is uneven
    assert np.abs(coded(name, x)[2].mean(0) / x[0] - 1).max() > 1e-2


@pytest.mark.parametrize(
    ("shape", "stacked", "wanted"),
    [
        ((768, 768), 0, (1, 64)),
        ((64, 96), 0, (1, 32)),
        ((256, 48), 0, (1, 16)),
        ((256, 24), 0, None),  # a row has no room for 16
        ((65536,), 0, None),
        ((32, 64), 0, None),  # small
        ((64, 64, 3, 3), 0, (1, 64)),
        ((64, 3, 7, 7), 0, None),
        ((12, 64, 768), 0, (2, 64)),
        ((12, 768), 1, None),  # twelve vectors
        ((12, 64, 64), 1, (2, 64)),
        ((100, 32, 64), 1, None),  # small, each of them
        ((), 0, None),
        ((0, 64), 0, None),
    ],
)
def test_groups_lie_within_rows_and_never_along_the_first_axis(shape: Any, stacked: int, wanted: Any) -> None:
    found = grouping(shape, stacked)
    assert found == wanted
    if found is not None:
        assert found.scales(shape) == (*shape[: found.axis], int(np.prod(shape[found.axis :])) // found.size)


def test_a_first_state_takes_little_more_memory_than_it_has() -> None:
    p = np.zeros((512, 2048), "float16")
    for dtype, kept, most in (("int8", 1.2, 6.0), ("float16", 2.0, 2.1)):
        tracemalloc.start()
        state = first_state(xp, LAMB(), Numerics(state_dtype=dtype), p)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert sum(entry.nbytes for entry in state.values()) <= kept * p.nbytes
        assert peak < most * p.nbytes


# ---- the one table of dtypes, held against the libraries that have them
