"""The random numbers of ``rules/noise.py``, by native code."""

from __future__ import annotations

from thalweg.kernels.cpu.library import load
from thalweg.rules.noise import NORMAL_STREAMS, stream_key


def fill_normal(address: int, dtype: str, count: int, *, seed: int, tensor: int, t: int, threads: int) -> None:
    """Fill an array of float32 or float64 with standard normal numbers."""
    keys = [stream_key(seed, tensor, stream) for stream in NORMAL_STREAMS]
    load().thalweg_normal(address, dtype == "float64", count, 0, *keys, t & 0xFFFFFFFF, threads)
