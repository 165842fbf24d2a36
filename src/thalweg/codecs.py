"""State in eight bits: how numbers become codes with a scale for each group of neighbours, and numbers again.

A codec stands between memory and arithmetic, as a dtype of 16 bits does. Codes are spaced by the bits of a float32: a
code is some leading bits of a number, so that its error is a share of it and no logarithm is ever taken. All that is
computed is exact or rounded once by IEEE's rules, so every array library finds the same codes.

- ``int8``, for what has a sign: 127 steps of 1/16 octave from 1 up to 248, of ``1 + abs(x) / scale``. Near 0, steps are
  even, and 0 is 0.
- ``uint8``, for what is never negative: 255 steps of 5/64 octave below the largest number of the group. There is no 0
  but in a group of zeros: a square root that is divided by must not vanish.

A scale that is not finite makes its whole group so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from thalweg.arrays import A, Shape, Space
from thalweg.dtypes import DTYPES

#: Neighbours that share a scale: this many, or the largest smaller power of two that divides a row.
GROUP = 64
#: Below so many in a group, or elements in a tensor, eight bits are not worth their scales.
LEAST_GROUP, LEAST_SIZE = 16, 4096
#: The bits of 1.0 in float32.
ONE = 0x3F800000
#: Smaller scales are 0: so nothing that has a code of its own is below the normal numbers, which some hardware takes
#: for 0.
LEAST_SCALE = 2.0**-106
#: 1 / 247 in float32. Not every compiler divides by a constant.
FOR_247 = float.fromhex("0x1.0953f40000000p-8")
#: 1 / 5 as a product and a shift: exact for the few bits that are left of a number.
FIFTH, FIFTH_SHIFT = 52429, 18


class Grouping(NamedTuple):
    """How the elements of a tensor are grouped: the axes from ``axis`` on form a row, cut into pieces of ``size``.

    Seen flat, element i of a tensor is in group i // size.
    """

    axis: int
    size: int

    def scales(self, shape: Shape) -> Shape:
        """The shape of the scales of a tensor, or of a shard of one."""
        return (*shape[: self.axis], math.prod(shape[self.axis :]) // self.size)


def grouping(shape: Shape, stacked_axes: int = 0) -> Grouping | None:
    """How a tensor of this shape is grouped; None: it stays in floating point.

    A row is the last axis, or as many of the last axes as make a whole group, but never the first axis: tensors that
    are sharded along that have the same groups.
    """
    first = stacked_axes + 1
    if len(shape) <= first or math.prod(shape[stacked_axes:]) < LEAST_SIZE:
        return None
    axis = len(shape) - 1
    while axis > first and math.prod(shape[axis:]) < GROUP:
        axis -= 1
    row = math.prod(shape[axis:])
    size = min(GROUP, row & -row)  # the largest power of two that divides it
    return Grouping(axis, size) if size >= LEAST_GROUP else None


def grouping_of(shape: Shape, scales: Shape) -> Grouping:
    """How a tensor of this shape is grouped if its scales have this one."""
    axis = len(scales) - 1
    return Grouping(axis, math.prod(shape[axis:]) // max(1, scales[axis]))


@dataclass(frozen=True)
class Codec:
    """A format of eight bits."""

    #: The dtype of its codes.
    name: str
    signed: bool
    #: What of the largest number of a group is its scale.
    share: float
    #: How far codes are apart in the bits of a float32, the bits that code 0 stands for, and the largest code.
    step: int
    first: int
    most: int

    def encode(self, xp: Space[A], x: A, groups: Grouping, chance: A | None = None) -> tuple[A, A]:
        """Codes and scales of x. chance: numbers between 0 and 1 that decide where rounding goes; None: nearest."""
        x = xp.astype(x, "float32")
        scales = xp.peaks(x, *groups) * self.share
        scales = xp.where(scales < LEAST_SCALE, 0.0, scales)
        divisors = xp.where(scales > 0.0, scales, math.inf)  # what is not finite gets codes of 0, as zeros do
        folded = xp.folded(x, *groups)
        ratios = xp.abs(folded) / xp.folded(divisors, groups.axis, 1)
        ratios = xp.where(ratios < math.inf, ratios, 0.0)
        up: Any = self.step // 2
        if chance is not None:
            up = xp.astype(xp.folded(chance, *groups) * float(self.step), "int32")
        bits = xp.maximum(xp.bits(ratios + 1.0 if self.signed else ratios) + (up - self.first), 0)
        codes = xp.minimum(self.whole_steps(bits), self.most)
        if self.signed:
            codes = xp.where(folded < 0.0, -codes, codes)
        return xp.reshape_like(xp.astype(codes, self.name), x), scales

    @property
    def shift(self) -> int:
        """How often 2 divides the step."""
        return (self.step & -self.step).bit_length() - 1

    def whole_steps(self, bits: Any) -> Any:
        """Bits divided by the step, which is a power of two or five times one."""
        return bits >> self.shift if self.signed else ((bits >> self.shift) * FIFTH) >> FIFTH_SHIFT

    def zeros(self, xp: Space[A], like: A, groups: Grouping) -> tuple[A, A]:
        """Codes and scales of zeros, without what encoding takes of memory."""
        nothing = xp.zeros_like(like)
        codes = xp.reshape_like(xp.astype(xp.folded(nothing, *groups), self.name), nothing)
        return codes, xp.astype(xp.peaks(nothing, *groups), "float32")

    def decode(self, xp: Space[A], codes: A, scales: A, groups: Grouping) -> A:
        """The numbers that codes and scales stand for, in float32."""
        steps = xp.astype(xp.folded(codes, *groups), "int32")
        ratios = xp.from_bits((xp.abs(steps) if self.signed else steps) * self.step + self.first)
        if self.signed:
            ratios = xp.where(steps < 0, 1.0 - ratios, ratios - 1.0)
        return xp.reshape_like(ratios * xp.folded(scales, groups.axis, 1), codes)


#: By the dtype of their codes.
CODECS: Mapping[str, Codec] = {
    codec.name: codec
    for codec in (
        Codec("int8", signed=True, share=FOR_247, step=2**19, first=ONE, most=127),
        Codec("uint8", signed=False, share=1.0, step=5 * 2**17, first=ONE - 255 * 5 * 2**17, most=255),
    )
}


def scale_key(key: str) -> str:
    """Where the scales of an entry of the state are."""
    return f"{key}_scale"


def bytes_of(dtype: str) -> int:
    """What an element takes in memory, in a dtype of floating point or in codes."""
    return 1 if dtype in CODECS else DTYPES[dtype].bytes
