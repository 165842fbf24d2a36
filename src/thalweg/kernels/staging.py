"""State that passes through a device in turns: what moves together, and which part of the device's memory it passes."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from thalweg.arrays import Shape
from thalweg.kernels.chunks import WHOLE_CHUNK, pieces
from thalweg.rules import Kron, Rule, WholeRule

#: Bytes that are moved together. Smaller ones leave the bus idle between copies, larger ones take more of the device.
STAGED = 2**26
#: Stretches of the device's memory: one that is being filled, one that is stepped, one that is being emptied.
SLOTS = 3
#: What exceeds the median so many times is an exception, such as an embedding. All such share the first slot.
EXCEPTIONAL = 4
#: Entries begin at multiples of this, as memory that a device gives out does.
ALIGNED = 512


def together(rule: Rule, shape: Shape, extents: Sequence[int], most: int = WHOLE_CHUNK) -> Iterator[range]:
    """Tensors of one shape that must not be parted, since one product of matrices takes them together.

    Of fewer at a time its bits might be others. extents: what each counts for; most: in a stack.
    """
    if isinstance(rule, Kron):
        yield range(len(extents))
    elif isinstance(rule, WholeRule) and rule.is_stackable(shape):
        yield from pieces(extents, most)
    else:
        yield from (range(i, i + 1) for i in range(len(extents)))


class Staged(NamedTuple):
    """Neighbours that are moved together, and the slot that they pass."""

    members: range
    slot: int


def staged(sizes: Sequence[int], count: int = 0, most: int = STAGED) -> list[Staged]:
    """How things of these bytes, in their order, are moved, at most so many bytes together.

    count: of all that is moved already, whose slots go before.

    >>> [(len(own.members), own.slot) for own in staged([2**25] * 5 + [2**30] + [2**26] * 2)]
    [(2, 0), (2, 1), (1, 2), (1, 0), (1, 1), (1, 2)]
    """
    parts = [part for part in pieces(sizes, most) if part]
    totals = [sum(sizes[i] for i in part) for part in parts]
    usual = statistics.median(totals) if totals else 0
    return [
        Staged(part, 0 if total > EXCEPTIONAL * usual else (count + index) % SLOTS)
        for index, (part, total) in enumerate(zip(parts, totals, strict=True))
    ]


def aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
