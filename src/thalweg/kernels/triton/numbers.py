"""What every kernel does with single numbers: random bits by their place, rounding, powers.

The formulas are those of ``rules.noise`` and ``boundary.rounded_stochastically``.
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def mix(h):
    """``rules.noise.mix`` in unsigned 32-bit integers, whose products wrap by themselves."""
    h = (h ^ (h >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


#: Whether Triton interprets kernels, as in tests without a GPU.
INTERPRETED = tl.constexpr(not isinstance(mix, triton.runtime.JITFunction))
#: Whether kernels may have lines in NVIDIA's assembly language: not if a torch for AMD's GPUs has been imported.
PTX = tl.constexpr(not INTERPRETED.value and not ("torch" in sys.modules and sys.modules["torch"].version.hip))


@triton.jit
def random_bits(key, t, position):
    """32 random bits for every position (int64). key: of seed, tensor and stream, uint32. t: the step, uint32."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    place = mix(high ^ key ^ tl.full((), 0x27D4EB2F, tl.uint32))
    return mix(mix(low ^ place) ^ mix(key ^ t))


@triton.jit
def random_bits_behind(key, t, first, index):
    """The same for positions behind the first one (int64), by less than 2**32 (int32)."""
    low, high = first.to(tl.uint32), (first >> 32).to(tl.uint32)
    low_sum = low + index.to(tl.uint32)
    # of the high half there are two, and of what becomes of it: not one for each element
    key_of_high = key ^ tl.full((), 0x27D4EB2F, tl.uint32)
    place = tl.where(low_sum < low, mix((high + 1) ^ key_of_high), mix(high ^ key_of_high))
    return mix(mix(low_sum ^ place) ^ mix(key ^ t))


@triton.jit
def half_of(bits, HIGH: tl.constexpr):
    """16 of 32 random bits, as int32: n stands for a chance of (n + 1/2) / 2**16."""
    return (bits >> 16 if HIGH else bits & 0xFFFF).to(tl.int32)


@triton.jit
def uniform(key, t, position):
    """Odd multiples of 2**-24 in (0, 1)."""
    return (random_bits(key, t, position) >> 9).to(tl.float32) * 1.1920928955078125e-07 + 5.960464477539063e-08


@triton.jit
def normal(key_of_u, key_of_v, t, position):
    """Standard normal numbers, from the two streams of ``rules.noise.normal``."""
    u, v = uniform(key_of_u, t, position), uniform(key_of_v, t, position)
    return tl.sqrt(-2.0 * tl.log(u)) * tl.cos(6.283185307179586 * v)


@triton.jit
def widened(x):
    """Neighbours in memory as float32; of bfloat16 with one instruction each, where compilers take three for two."""
    if PTX and x.dtype == tl.bfloat16:
        asm: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        x = tl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    return x.to(tl.float32)


@triton.jit
def as_stored(x, chance, DTYPE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """x (float32) in the dtype it is stored in: rounded to nearest, or up or down by 16 random bits."""
    if DTYPE == tl.bfloat16 and (STOCHASTIC or INTERPRETED):
        return rounded_to_bfloat16(x, chance, STOCHASTIC)
    elif DTYPE == tl.float16 and STOCHASTIC:
        return rounded_to_float16(x, chance).to(tl.float16)
    else:
        return x.to(DTYPE)


@triton.jit
def rounded_to_bfloat16(x, chance, STOCHASTIC: tl.constexpr):
    """One of the two bfloat16 neighbours of x, which share all but 16 bits of their patterns with it.

    Under Triton's interpreter also for rounding to nearest: its conversions cut off instead.
    """
    pattern = x.to(tl.int32, bitcast=True)
    if STOCHASTIC:
        # away from zero if this carries; below zero, "up" is towards zero
        rounded = pattern + (chance ^ (~(pattern >> 31) & 0xFFFF))
    else:
        rounded = pattern + 0x7FFF + ((pattern >> 16) & 1)
    upper = tl.where(x == x, rounded >> 16, 0x7FC0)
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def rounded_to_float16(x, chance):
    """One of the two float16 neighbours of x, as float32. Distances are powers of 2, so every line is exact."""
    exponent = ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 126
    exponent = tl.where(exponent < -13, -13, exponent)
    units = x * power_of_2(11 - exponent)
    below = tl.floor(units)
    share = (chance.to(tl.float32) + 0.5) * 1.52587890625e-05
    return (below + tl.where(units - below > share, 1.0, 0.0)) * power_of_2(exponent - 11)


@triton.jit
def quotient(x, y):
    """x / y to two units in the last place, where y is between 2**-126 and 2**126: a quarter of the instructions."""
    if INTERPRETED:
        return x / y
    else:
        return libdevice.fast_dividef(x, y)


@triton.jit
def power_of_2(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def expm1(x):
    """exp(x) - 1, by a series where it is small: there it would cancel."""
    series = x * 0.125
    for n in tl.static_range(7, 1, -1):
        series = (1 + series) * (x * (1.0 / n))  # no division: programs do this for every chunk
    return tl.where(tl.abs(x) < 0.5, (1 + series) * x, tl.exp(x) - 1)


@triton.jit
def power(x, y):
    """x**y, where x is negative for whole y alone: else NaN."""
    x, y = tl.core.to_tensor(x), tl.core.to_tensor(y)  # either may be a number that stands in the rule
    size = tl.where(y == 0.0, 1.0, tl.exp(y * tl.log(tl.abs(x))))
    half = y * 0.5
    signed = tl.where(tl.floor(half) == half, size, tl.where(tl.floor(y) == y, -size, float("nan")))
    return tl.where(x < 0.0, signed, size)


@triton.jit
def larger(x, y):
    """The larger of two, NaN if either is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def is_finite(x):
    """Whether x is neither infinite nor NaN."""
    return tl.abs(x) < float("inf")
