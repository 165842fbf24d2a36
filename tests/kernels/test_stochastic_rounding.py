"""Stochastic rounding by native code: the random bits and the neighbours that the boundary chooses, to the bit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from side_by_side import NARROW, alike, kind, made, needs_core, widened

from thalweg.boundary import ROUNDING_STREAM, rounded_stochastically
from thalweg.kernels.cpu.library import is_here, levels, load
from thalweg.kernels.cpu.tables import END, MEASURE, Operand, Options, Tables
from thalweg.rules import LARS
from thalweg.rules.noise import NORMAL_STREAMS, chance, stream_key, tensor_id
from thalweg.settings import Numerics
from thalweg.spaces import numpy as reference

pytestmark = needs_core

sixteen_bits = pytest.mark.parametrize("dtype", NARROW)
#: p - g, exactly what float32 says.
EXACT: dict[str, Any] = dict(lr=1.0, trust=False, momentum=0.0, rounding="stochastic")
LEVELS = [] if not is_here() else levels(load())


def numbers(size: int, seed: int = 0) -> Any:
    """float32 of all bit patterns."""
    return np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view("float32")


def both(gradient: Any, dtype: str, name: Any = "w", steps: int = 1, **options: Any) -> tuple[Any, Any]:
    """The parameter after steps from zero, by native code and by the rule."""
    results = []
    for engine in ("fused", "reference"):
        optimizer = made("LARS", engine, **EXACT, **options)
        for _ in range(steps):
            weights = np.zeros(gradient.shape, kind(dtype))
            optimizer.update(name, weights, gradient)
        assert optimizer.engine == engine
        results.append(weights)
    return results[0], results[1]


@sixteen_bits
@pytest.mark.parametrize("level", range(len(LEVELS)), ids=LEVELS)
def test_every_number_goes_to_the_same_neighbour(dtype: str, level: int) -> None:
    x = numbers(300_001)
    assert load().thalweg_choose_level(level)
    try:
        found, expected = both(x, dtype)
    finally:
        load().thalweg_choose_level(-1)
    alike(found, expected)
    with np.errstate(all="ignore"):
        assert (expected != (np.float32(0) - x).astype(kind(dtype))).mean() > 0.04  # nearest would not do


@sixteen_bits
def test_numbers_next_to_a_neighbour_and_at_the_ends(dtype: str) -> None:
    every = widened(np.arange(2**16, dtype=np.uint16).view(kind(dtype)))
    with np.errstate(invalid="ignore"):
        x = np.concatenate([every, *(np.nextafter(every, np.float32(way)) for way in (-np.inf, np.inf))])
    alike(*both(x, dtype))
    ends = np.array([65504, 65505, 65519, 65520, 65535, 65536, 1e5, 3.38e38, 3.39e38, 3.4e38, np.inf], "float32")
    alike(*both(np.resize(np.concatenate([ends, -ends]), 5000), dtype))


@sixteen_bits
def test_chances_differ_by_seed_name_and_step_as_the_boundary_has_them(dtype: str) -> None:
    x, seen = numbers(2000, 1), set()
    for seed, name, steps in [(0, "w", 1), (7, "w", 1), (-1, "w", 1), (2**40 + 3, "w", 1), (0, "v", 1), (0, 5, 1)]:
        found, expected = both(x, dtype, name, steps, seed=seed)
        alike(found, expected)
        seen.add(found.tobytes())
    found, expected = both(x, dtype, steps=3)
    alike(found, expected)
    assert len(seen | {found.tobytes()}) == 7


def test_the_noise_of_kron_beyond_positions_of_32_bits() -> None:
    """A piece that begins late is a piece of the whole. tests/engines has that the noise is that of the rule."""
    keys = [stream_key(5, 6, stream) for stream in NORMAL_STREAMS]
    for position in (0, 1000, 2**32 - 500, 3 * 2**32 - 1):
        whole, part = np.empty(2000), np.empty(700)
        load().thalweg_normal(whole.ctypes.data, 1, 2000, position, *keys, 7, 1)
        load().thalweg_normal(part.ctypes.data, 1, 700, position + 900, *keys, 7, 1)
        assert whole[900:1600].tobytes() == part.tobytes()
        assert len(set(whole)) == 2000


@sixteen_bits
@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 - 1000, 2**32 - 1, 2**32, 2**33 + 12345, 7 * 2**32 - 3])
def test_positions_beyond_32_bits(dtype: str, position: int) -> None:
    """No test could allocate so much: native code is told that its tensor begins there."""
    size, t, seed = 2000, 3, 11
    numerics = Numerics(rounding="stochastic", seed=seed)
    rule = LARS(trust=False, momentum=0.0)
    x, weights = numbers(size, 2), np.zeros(size, kind(dtype))
    places = weights.ctypes.data, x.ctypes.data
    operand = Operand("w", (size,), *places, (), (dtype, "float32"), 0, position)
    options = [Options(rule, numerics, t, 1.0, 1.0)]
    tables = Tables([operand], options)
    tables.fill(options, 1)
    tables.run(MEASURE, END)

    index = np.arange(position, position + size, dtype=np.uint64)
    halves = index & np.uint64(0xFFFFFFFF), index >> np.uint64(32)
    there: Any = SimpleNamespace(**{**vars(reference), "positions": lambda like: halves})
    with np.errstate(all="ignore"):
        draw = chance(there, x, seed=seed, tensor=tensor_id("w"), t=t, stream=ROUNDING_STREAM)
        expected = rounded_stochastically(reference, np.float32(0) - x, dtype, draw).astype(kind(dtype))
    alike(weights, expected)
