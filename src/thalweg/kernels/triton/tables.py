"""Many tensors in one launch: tables on the device that say where each tensor lies.

Tables are built once and follow only what has moved; gradients, which move most, have a column of their own. Nothing
here knows whose memory it is: *uploads* makes tables and scratch of a framework.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from thalweg.kernels.triton.rows import COLUMNS, RECORD, SIZE, STATE, Operand, P, Tensor, rows_of

#: Addresses from which the widest loads can be made are multiples of this.
ALIGNMENT = 16
#: The lowest bytes of such addresses.
ALIGNED = bytes(range(0, 256, ALIGNMENT))


def is_aligned(operand: Operand, row: Sequence[int]) -> bool:
    """Whether all that is read in blocks begins where the widest loads can be made."""
    small = [entry is not None and entry.numel() < operand.p.numel() for entry in operand.entries]
    state = [place for place, is_small in zip(row[STATE.value :], small, strict=False) if not is_small]
    return all(place % ALIGNMENT == 0 for place in (row[P.value], *state, row[RECORD.value]))


class Gradients:
    """Where gradients are: their addresses on the device, and whether the widest loads can be made from all of them."""

    def __init__(self, count: int, uploads: Any) -> None:
        self.count, self.uploads = count, uploads
        self.gradients = uploads.empty((count,), "int64")
        self.grads_aligned = True

    def follow_places(self, places: array[int]) -> None:
        """Note where the rows of gradients are now."""
        self.grads_aligned = are_aligned(places)
        self.uploads.refill(self.gradients, places.tolist())


class Tables(Gradients):
    """Rows of some operands."""

    def __init__(
        self,
        operands: Sequence[Operand],
        grads: Sequence[Tensor],
        keys: Sequence[str],
        stacked_axes: int,
        seed: int,
        uploads: Any,
    ) -> None:
        nested = [rows_of(operand, keys, stacked_axes, seed) for operand in operands]
        rows = list(itertools.chain.from_iterable(nested))
        super().__init__(len(rows), uploads)
        self.operands, self.slices = operands, [len(rows) for rows in nested]
        self.sizes = [row[SIZE.value] for row in rows]
        self.rows = uploads.table(array("q", itertools.chain.from_iterable(rows)), COLUMNS.value)
        self.aligned = all(is_aligned(operands[i], row) for i, of_operand in enumerate(nested) for row in of_operand)
        #: From one slice of a gradient to the next, in bytes.
        self.strides = [
            g.numel() // max(1, slices) * g.element_size() for g, slices in zip(grads, self.slices, strict=True)
        ]
        self.follow(grads)

    def follow(self, grads: Sequence[Tensor]) -> None:
        """Note where the gradients are now."""
        parts = zip(grads, self.strides, self.slices, strict=True)
        self.follow_places(
            array("Q", [g.data_ptr() + i * stride for g, stride, slices in parts for i in range(slices)])
        )


def are_aligned(addresses: array[int]) -> bool:
    """Whether the widest loads can be made from all of them."""
    lowest = addresses.tobytes()[:: addresses.itemsize]  # GPUs' hosts have the lowest byte first
    return not lowest.translate(None, ALIGNED)
