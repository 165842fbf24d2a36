"""Random numbers that depend on nothing but their place: seed, tensor, step and position.

There is no generator and no state. The same element at the same step gets the same number on
every array library, device, engine and sharding, and after a resumed run as before it.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

from thalweg.arrays import A, Scalar, Space, Value, is_number

MASK = 0xFFFFFFFF
#: The two streams that normal numbers are made of.
NORMAL_STREAMS = (0, 1)


def tensor_id(name: str | int) -> int:
    """A 32-bit number for a parameter's name."""
    return zlib.crc32(f"{type(name).__name__}:{name}".encode("utf-8", "surrogatepass"))


def mix(h: Any, word: Callable[[int], Any] = int) -> Any:
    """Scramble 32-bit integers one to one, so that neighbours end up far apart.

    Xor-shifts and odd multipliers (those of "lowbias32", found by search for least bias).
    Written with operators alone: any integer type serves whose products keep their low 32 bits.
    ``word`` makes the constants of that type.
    """
    h = ((h ^ (h >> 16)) * word(0x7FEB352D)) & word(MASK)
    h = ((h ^ (h >> 15)) * word(0x846CA68B)) & word(MASK)
    return h ^ (h >> 16)


def stream_key(seed: int, tensor: Scalar, stream: int, word: Callable[[int], Any] = int) -> Scalar:
    """What sets the random bits of one seed, tensor and stream apart from all others."""
    word_key = mix((tensor & word(MASK)) ^ word(mix((seed & MASK) ^ 0x9E3779B9)), word)
    return mix(word_key ^ word(stream * 0x85EBCA6B & MASK), word)


def bits(xp: Space[A], like: A, *, seed: int, tensor: Scalar, t: Scalar, stream: int = 0) -> Any:
    """32 random bits for each element of ``like``; streams of one step are independent."""
    low, high = xp.positions(like)
    key = stream_key(seed, tensor, stream, int if is_number(tensor) else xp.word)

    def join(x: Any, y: Any) -> Any:
        """Mix two words: by Python itself where both are numbers."""
        if is_number(x) and is_number(y):
            return mix(x ^ y)
        return mix(x ^ (xp.word(y) if is_number(y) else y), xp.word)

    step = join(t if is_number(t) else xp.astype(t, xp.dtype(low)), key)
    return join(join(low, join(high, key ^ 0x27D4EB2F)), step)


def uniform(xp: Space[A], like: A, *, seed: int, tensor: Scalar, t: Scalar, stream: int = 0) -> A:
    """Odd multiples of 2**-24 in (0, 1)."""
    h = bits(xp, like, seed=seed, tensor=tensor, t=t, stream=stream)
    # these are exact in float32, so every precision sees the same numbers
    return xp.astype(h >> 9, xp.dtype(like)) * 2.0**-23 + 2.0**-24


def chance(xp: Space[A], like: A, *, seed: int, tensor: Scalar, t: Scalar, stream: int, half: int = 0) -> A:
    """Odd multiples of 2**-17 in (0, 1). half: which 16 bits they are made of, low ones (0) or high ones (1)."""
    h = bits(xp, like, seed=seed, tensor=tensor, t=t, stream=stream)
    return (xp.astype(h >> 16 if half else h & xp.word(0xFFFF), xp.dtype(like)) + 0.5) * 2.0**-16


def normal(xp: Space[A], like: A, *, seed: int, tensor: Scalar, t: Scalar) -> Value:
    """Standard normal numbers, by Box and Muller's transform; at most 5.8 deviations out."""
    u, v = (uniform(xp, like, seed=seed, tensor=tensor, t=t, stream=stream) for stream in NORMAL_STREAMS)
    return xp.sqrt(-2.0 * xp.log(u)) * xp.cos(2 * math.pi * v)
