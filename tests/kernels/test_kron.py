"""Kron with native code beside it: its noise, and small tensors of equal shape as one batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits
from side_by_side import needs_core
from tolerances import NATIVE_NORMALS

from thalweg.kernels.cpu.library import levels, load, reason_missing
from thalweg.kernels.cpu.noise import fill_normal
from thalweg.kernels.threads import set_num_threads
from thalweg.numpy import Kron
from thalweg.rules.noise import NORMAL_STREAMS, normal, stream_key
from thalweg.spaces import numpy as reference

pytestmark = needs_core

LEVELS = [] if reason_missing() is not None else levels(load())
#: Several of each shape, some too large to be stacked with others.
SHAPES = {
    **{f"m{i}": (6, 4) for i in range(4)},
    **{f"v{i}": (7,) for i in range(3)},
    **{f"n{i}": () for i in range(2)},
    **{f"t{i}": (3, 4, 5) for i in range(2)},
    "alone": (9, 9),
    "large": (150, 120),
    "large too": (150, 120),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    set_num_threads(None)
    if LEVELS:
        load().thalweg_choose_level(-1)


def filled(size: int, dtype: str, threads: int = 1, **key: Any) -> Any:
    out = np.full(size, np.nan, dtype)
    fill_normal(out.ctypes.data, dtype, size, threads=threads, **key)
    return out


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [1, 17, 1000, 16_385, 100_003])
def test_the_noise_is_that_of_the_rules(dtype: str, size: int) -> None:
    for key in (
        dict(seed=0, tensor=1, t=1),
        dict(seed=-3, tensor=4_000_000_000, t=70),
        dict(seed=9, tensor=0, t=2**31),
    ):
        found, expected = filled(size, dtype, **key), normal(reference, np.zeros(size, dtype), **key)
        assert np.abs(found - expected).max() <= NATIVE_NORMALS[dtype]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_noise_has_the_same_bits_for_any_threads_and_vectors(dtype: str) -> None:
    results = set()
    for level in range(len(LEVELS)):
        assert load().thalweg_choose_level(level)
        for threads in (1, 2, 7):
            results.add(filled(100_003, dtype, threads, seed=1, tensor=2, t=3).tobytes())
    assert len(results) == 1


def test_the_noise_beyond_positions_of_32_bits() -> None:
    """A piece that begins late is a piece of the whole."""
    keys = [stream_key(5, 6, stream) for stream in NORMAL_STREAMS]
    for position in (0, 1000, 2**32 - 500, 3 * 2**32 - 1):
        whole, part = np.empty(2000), np.empty(700)
        load().thalweg_normal(whole.ctypes.data, 1, 2000, position, *keys, 7, 1)
        load().thalweg_normal(part.ctypes.data, 1, 700, position + 900, *keys, 7, 1)
        assert bits(whole[900:1600]) == bits(part)
        assert len(set(whole)) == 2000


def test_parameters_of_one_batch_do_not_share_their_state() -> None:
    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 3)
    optimizer = Kron(lr=0.02, engine="fused")
    for step in grads:
        optimizer.step(params, step)
    entries = [entry for state in optimizer.state.values() for key, entry in state.items() if key != "step"]
    for i, first in enumerate(entries):
        for second in entries[:i]:
            assert not np.shares_memory(first, second)
