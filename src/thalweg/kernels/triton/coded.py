"""State in eight bits, and records of what rounding has cost, as kernels read and write them.

The formulas are those of ``codecs`` and ``boundary``. Groups of neighbours are the rows of a block that is folded: of
consecutive elements that begin and end with a group.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from thalweg import codecs
from thalweg.kernels.triton.numbers import INTERPRETED, PTX, quotient, widened

ONE, LEAST_SCALE = tl.constexpr(codecs.ONE), tl.constexpr(codecs.LEAST_SCALE)
SIGNED_STEP, SIGNED_SHARE, SIGNED_MOST, SIGNED_SHIFT = (
    tl.constexpr(getattr(codecs.CODECS["int8"], fact)) for fact in ("step", "share", "most", "shift")
)
SQUARE_STEP, SQUARE_FIRST, SQUARE_MOST, SQUARE_SHIFT = (
    tl.constexpr(getattr(codecs.CODECS["uint8"], fact)) for fact in ("step", "first", "most", "shift")
)
#: A code is found in the highest byte of a word: there it costs least to take it. Signed ones, some leading bits of a
#: float32, are so far below it.
TO_TOP = tl.constexpr(24 - SIGNED_SHIFT.value)
#: Of squares, as many bits are taken away as half a step does without: what is left are whole units.
UNIT_SHIFT = tl.constexpr(SQUARE_SHIFT.value - 1)
#: Times this, units are steps in the highest byte, rounded down: exact for so few.
STEP_FROM_UNITS = tl.constexpr(-(-(2**24) // (SQUARE_STEP.value >> UNIT_SHIFT.value)))
#: A number whose last bit is a whole one: sums with it convert whole numbers in no time.
WHOLE = tl.constexpr(12582912.0)
#: Another, for what is above -129, and its bits.
BIAS, BIAS_BITS = tl.constexpr(8388736.0), tl.constexpr(0x4B000080)
#: The ratio that code 0 of squares stands for.
SQUARE_LEAST = tl.constexpr(struct.unpack("f", struct.pack("i", SQUARE_FIRST.value))[0])


# ---- codes


@triton.jit
def in_top_byte(codes):
    """Words with a code in the highest byte, and 0 below it."""
    if PTX:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0, 0x0444; prmt.b32 $1, $4, 0, 0x1444;"
            "prmt.b32 $2, $4, 0, 0x2444; prmt.b32 $3, $4, 0, 0x3444;",
            "=r,=r,=r,=r,r",
            [codes],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
    else:
        return codes.to(tl.uint8, bitcast=True).to(tl.int32) << 24


@triton.jit
def of_top_byte(words, DTYPE: tl.constexpr):
    """The highest bytes of words."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a, b; prmt.b32 a, $1, $2, 0x0073; prmt.b32 b, $3, $4, 0x0073; prmt.b32 $0, a, b, 0x5410; }",
            "=r,r,r,r,r",
            [words],
            dtype=tl.int8,
            is_pure=True,
            pack=4,
        ).to(DTYPE, bitcast=True)
    else:
        return (words >> 24).to(DTYPE)


@triton.jit
def folded(x, GROUP: tl.constexpr):
    """A row for each group."""
    return tl.reshape(x, (x.numel // GROUP, GROUP))


@triton.jit
def read_codes(place, scales, mask, groups):
    """Codes and the scales of their groups; 0 where the mask says that there are none. groups: the mask of scales."""
    if mask is None:
        return tl.load(place), tl.load(scales)
    else:
        return tl.load(place, mask, other=0), tl.load(scales, groups, other=0.0)


@triton.jit
def decoded(codes, scale, GROUP: tl.constexpr):
    """The numbers that codes stand for."""
    scale = scale[:, None]
    if codes.dtype == tl.int8:
        # a byte in the place of a number's sign and exponent: fewer instructions than to widen it as a number
        high = folded(in_top_byte(codes), GROUP)
        ratios = ((tl.abs(high) >> TO_TOP) + ONE).to(tl.float32, bitcast=True)
        if INTERPRETED:  # which rounds products by themselves
            sizes = (ratios - 1.0) * scale
        else:
            sizes = tl.fma(ratios, scale, -scale)
        numbers = (sizes.to(tl.int32, bitcast=True) ^ (high & -0x80000000)).to(tl.float32, bitcast=True)
    else:
        steps = folded(codes.to(tl.int32), GROUP)
        numbers = (steps * SQUARE_STEP + SQUARE_FIRST).to(tl.float32, bitcast=True) * scale
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
    inverse = tl.where((scale > 0.0) & (scale < float("inf")), quotient(0.25, scale * 0.25), 0.0)[:, None]
    ratios = sizes.to(tl.float32, bitcast=True) * inverse
    # what is not finite has code 0, as zeros have
    LEAST: tl.constexpr = 1.0 if SIGNED else SQUARE_LEAST
    if SIGNED:
        ratios = ratios + 1.0
    if INTERPRETED:  # where the larger of a number and NaN is NaN
        ratios = tl.where(ratios > LEAST, ratios, LEAST)
    bits = tl.maximum(ratios, LEAST).to(tl.int32, bitcast=True)
    STEP: tl.constexpr = SIGNED_STEP if SIGNED else SQUARE_STEP
    FIRST: tl.constexpr = ONE if SIGNED else SQUARE_FIRST
    MOST: tl.constexpr = SIGNED_MOST if SIGNED else SQUARE_MOST
    if STOCHASTIC:
        bits += folded(chance, GROUP) * (STEP >> 16) + (STEP >> 17)  # (chance + 1/2) / 2**16 of a step
        # to the nearest, none is beyond the largest
        bits = tl.minimum(bits, FIRST + (MOST + 1) * STEP - 1)
    HALF: tl.constexpr = 0 if STOCHASTIC else STEP // 2
    if SIGNED:
        codes = (bits << TO_TOP) + (((HALF - FIRST) << TO_TOP) & 0xFFFFFFFF)
        codes = tl.where(folded(x, GROUP) < 0.0, 0xFFFFFF - codes, codes)
    else:
        codes = ((bits >> UNIT_SHIFT) + ((HALF - FIRST) >> UNIT_SHIFT)) * STEP_FROM_UNITS
    tl.store(place, of_top_byte(tl.reshape(codes, x.shape), place.dtype.element_ty), mask)
    tl.store(scales, scale, groups)


# ---- parameters of 16 bits with a record of what rounding has cost them


@triton.jit
def power_below(p, DTYPE: tl.constexpr):
    """The bits of the power of 2 that measures the distance between neighbours of p (float32) in a dtype.

    Those of infinity where p is not finite.
    """
    LEAST: tl.constexpr = 1 if DTYPE == tl.bfloat16 else 113
    power = tl.maximum(p.to(tl.int32, bitcast=True) & 0x7F800000, LEAST << 23)
    return tl.where(p == 0.0, 126 << 23, power)


@triton.jit
def biased(steps):
    """Whole numbers of eight bits as float32, with BIAS added to them."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 a; xor.b32 a, $4, 0x80808080;"
            "prmt.b32 $0, a, 0x4b000000, 0x7440; prmt.b32 $1, a, 0x4b000000, 0x7441;"
            "prmt.b32 $2, a, 0x4b000000, 0x7442; prmt.b32 $3, a, 0x4b000000, 0x7443; }",
            "=r,=r,=r,=r,r",
            [steps],
            dtype=tl.float32,
            is_pure=True,
            pack=4,
        )
    else:
        return (steps.to(tl.int32) + BIAS_BITS).to(tl.float32, bitcast=True)


@triton.jit
def with_record(p, place, mask, DTYPE: tl.constexpr):
    """A parameter (float32) with what rounding has cost it. place: that of its record."""
    UNIT: tl.constexpr = 2.0**-15 if DTYPE == tl.bfloat16 else 2.0**-18
    steps = tl.load(place) if mask is None else tl.load(place, mask, other=0)
    power = tl.minimum(power_below(p, DTYPE), 254 << 23).to(tl.float32, bitcast=True)
    return p + (biased(steps) * UNIT - BIAS * UNIT) * power  # all products are exact


@triton.jit
def record_of(new, stored):
    """What rounding has cost: new (float32) is what was to be stored."""
    UNITS: tl.constexpr = 2.0**15 if stored.dtype == tl.bfloat16 else 2.0**18
    rounded = widened(stored)
    inverse = ((254 << 23) - power_below(rounded, stored.dtype)).to(tl.float32, bitcast=True)
    steps = (new - rounded) * UNITS * inverse
    steps = tl.where(tl.abs(steps) <= 128.0, steps + 0.5, 0.0)  # 0 where it is not finite
    steps = tl.minimum(tl.maximum(steps, -127.0), 127.0)
    if PTX:  # rounded down in a sum with a number whose last bit is a whole one
        asm: tl.constexpr = "add.rm.f32 $0, $1, 0f4B400000;"
        steps = tl.inline_asm_elementwise(asm, "=r,r", [steps], dtype=tl.float32, is_pure=True, pack=1)
    else:
        steps = tl.floor(steps) + WHOLE
    return steps.to(tl.int32, bitcast=True).to(tl.int8)
