"""Kron with native code beside it: its noise, and small tensors of equal shape as one batch.

tests/engines/test_pinned.py has that the noise is that of the rules, test_same_bits.py that threads do not matter.
"""

from __future__ import annotations

import numpy as np
from agree import draw, draw_gradients
from raw_arrays import bits
from side_by_side import needs_core

from thalweg.kernels.cpu.library import load
from thalweg.numpy import Kron
from thalweg.rules.noise import NORMAL_STREAMS, stream_key

pytestmark = needs_core

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
