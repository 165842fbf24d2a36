"""State in eight bits, and records of what rounding has cost, as kernels read and write them.

The formulas are those of ``codecs`` and ``boundary``. Groups of neighbours are the rows of a block that is folded: of
consecutive elements that begin and end with a group.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from thalweg import codecs
from thalweg.kernels.triton.numbers import INTERPRETED, power_of_2

ONE, LEAST_SCALE = tl.constexpr(codecs.ONE), tl.constexpr(codecs.LEAST_SCALE)
SIGNED_STEP, SIGNED_SHARE, SIGNED_MOST = (
    tl.constexpr(getattr(codecs.CODECS["int8"], fact)) for fact in ("step", "share", "most")
)
SQUARE_STEP, SQUARE_FIRST, SQUARE_MOST = (
    tl.constexpr(getattr(codecs.CODECS["uint8"], fact)) for fact in ("step", "first", "most")
)
#: The ratio that code 0 of squares stands for.
SQUARE_LEAST = tl.constexpr(struct.unpack("f", struct.pack("i", SQUARE_FIRST.value))[0])


# ---- codes


@triton.jit
def folded(x, GROUP: tl.constexpr):
    """A row for each group."""
    return tl.reshape(x, (x.numel // GROUP, GROUP))


@triton.jit
def decoded(place, scales, mask, groups, GROUP: tl.constexpr):
    """The numbers that codes stand for; 0 where the mask says that there are none. groups: the mask of scales."""
    if mask is None:
        codes, scale = tl.load(place), tl.load(scales)
    else:
        codes, scale = tl.load(place, mask, other=0), tl.load(scales, groups, other=0.0)
    if codes.dtype == tl.int8:
        # a byte in the place of a number's sign and exponent: fewer instructions than to widen it as a number
        high = folded(codes.to(tl.uint8, bitcast=True).to(tl.int32) << 24, GROUP)
        ratios, scale = ((tl.abs(high) >> 5) + ONE).to(tl.float32, bitcast=True), scale[:, None]
        if INTERPRETED:  # which rounds products by themselves
            sizes = (ratios - 1.0) * scale
        else:
            sizes = tl.fma(ratios, scale, -scale)
        numbers = (sizes.to(tl.int32, bitcast=True) ^ (high & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        steps = folded(codes.to(tl.int32), GROUP)
        numbers = (steps * SQUARE_STEP + SQUARE_FIRST).to(tl.float32, bitcast=True) * scale[:, None]
    return tl.reshape(numbers, codes.shape)


@triton.jit
def store_coded(place, scales, x, chance, mask, groups, GROUP: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Write numbers as codes, with the scales of their groups."""
    SIGNED: tl.constexpr = place.dtype.element_ty == tl.int8
    # magnitudes are ordered as their bits are, and NaN is the largest
    sizes = folded(x.to(tl.int32, bitcast=True), GROUP)
    if SIGNED or INTERPRETED:  # elsewhere squares, and what is not a number, have no sign
        sizes = sizes & 0x7FFFFFFF
    scale = tl.max(sizes, 1).to(tl.float32, bitcast=True)
    if SIGNED:
        scale = scale * SIGNED_SHARE
    scale = tl.where(scale < LEAST_SCALE, 0.0, scale)
    # one division for each group, instead of one for each number: a code may be another where two are equally near
    inverse = tl.where((scale > 0.0) & (scale < float("inf")), 1.0 / scale, 0.0)[:, None]
    ratios = sizes.to(tl.float32, bitcast=True) * inverse
    # what is not finite has code 0, as zeros have
    LEAST: tl.constexpr = 1.0 if SIGNED else SQUARE_LEAST
    if SIGNED:
        ratios = ratios + 1.0
    ratios = tl.where(ratios > LEAST, ratios, LEAST)
    STEP: tl.constexpr = SIGNED_STEP if SIGNED else SQUARE_STEP
    up = STEP // 2
    if STOCHASTIC:
        up = (folded(chance, GROUP) * STEP).to(tl.int32)
    if SIGNED:
        codes = (ratios.to(tl.int32, bitcast=True) + (up - ONE)) >> 19
    else:
        codes = (((ratios.to(tl.int32, bitcast=True) + (up - SQUARE_FIRST)) >> 17) * 52429) >> 18
    if STOCHASTIC:  # to the nearest, none is beyond the largest
        codes = tl.minimum(codes, SIGNED_MOST if SIGNED else SQUARE_MOST)
    if SIGNED:
        codes = tl.where(folded(x, GROUP) < 0.0, -codes, codes)
    tl.store(place, tl.reshape(codes, x.shape).to(place.dtype.element_ty), mask)
    tl.store(scales, scale, groups)


# ---- parameters of 16 bits with a record of what rounding has cost them


@triton.jit
def exponent_of(p, DTYPE: tl.constexpr):
    """Of the distance between neighbours of p (float32) among the numbers of a dtype, up to a constant."""
    pattern = p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    LEAST: tl.constexpr = 1 if DTYPE == tl.bfloat16 else 113
    exponent = tl.minimum(tl.maximum(pattern >> 23, LEAST), 254) - 127
    return tl.where(pattern == 0, -1, exponent)


@triton.jit
def with_record(p, place, mask, DTYPE: tl.constexpr):
    """A parameter (float32) with what rounding has cost it. place: that of its record."""
    UNIT: tl.constexpr = 2.0**-15 if DTYPE == tl.bfloat16 else 2.0**-18
    steps = tl.load(place) if mask is None else tl.load(place, mask, other=0)
    return p + steps.to(tl.float32) * (power_of_2(exponent_of(p, DTYPE)) * UNIT)


@triton.jit
def record_of(new, stored):
    """What rounding has cost: new (float32) is what was to be stored."""
    UNITS: tl.constexpr = 2.0**15 if stored.dtype == tl.bfloat16 else 2.0**18
    rounded = stored.to(tl.float32)
    steps = (new - rounded) * UNITS * power_of_2(-exponent_of(rounded, stored.dtype))
    steps = tl.floor(steps + 0.5)
    steps = tl.where(tl.abs(steps) <= 128.0, steps, 0.0)  # 0 where it is not finite
    return tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int32).to(tl.int8)
