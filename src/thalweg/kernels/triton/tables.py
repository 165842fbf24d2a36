"""Many tensors in one launch: tables on the device that say where each tensor lies, and which piece is whose.

Tables are built once and follow only what has moved; gradients, which move most, have a column of their own. Nothing
here knows whose memory it is: *uploads* makes tables and scratch of a framework, *compiled* launches kernels on them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

from thalweg.kernels.triton.rows import COLUMNS, RECORD, SIZE, STATE, Operand, P, Tensor, rows_of, total_kernel
from thalweg.kernels.triton.stages import BLOCK, WARPS

#: Addresses from which the widest loads can be made are multiples of this.
ALIGNMENT = 16
#: The lowest bytes of such addresses.
ALIGNED = bytes(range(0, 256, ALIGNMENT))


def enumerate_pieces(counts: Sequence[int]) -> array[int]:
    """(owner, piece) for each of so many pieces of each owner."""
    table, place = array("i", bytes(8 * sum(counts))), 0
    for owner, count in enumerate(counts):
        end = place + 2 * count
        table[place:end:2] = array("i", [owner]) * count
        table[place + 1 : end : 2] = array("i", range(count))
        place = end
    return table


def is_aligned(operand: Operand, row: Sequence[int]) -> bool:
    """Whether all that is read in blocks begins where the widest loads can be made."""
    small = [entry is not None and entry.numel() < operand.p.numel() for entry in operand.entries]
    state = [place for place, is_small in zip(row[STATE.value :], small, strict=False) if not is_small]
    return all(place % ALIGNMENT == 0 for place in (row[P.value], *state, row[RECORD.value]))


class Chunks:
    """All chunks of some tensors, in tables on the device."""

    warps = WARPS

    def __init__(self, sizes: Sequence[int], blocks: int, uploads: Any) -> None:
        """blocks: how many one program goes through in turn."""
        self.size = BLOCK * blocks
        pieces = [-(-size // self.size) for size in sizes]
        self.count = sum(pieces)
        #: By chunk: whose it is, and which of its owner's.
        self.given = (uploads.table(enumerate_pieces(pieces), 2),)
        #: By tensor: where its chunks begin in the list of all, with the end of the last behind them.
        self.begins = uploads.table(array("i", itertools.accumulate(pieces, initial=0)))

    def constants(self, aligned: bool) -> dict[str, int]:
        """What kernels are compiled for. aligned: whether addresses allow the widest loads."""
        return dict(ALIGNED=aligned, CHUNK=self.size, BLOCK=BLOCK)


class Tables:
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
        self.operands, self.uploads = operands, uploads
        nested = [rows_of(operand, keys, stacked_axes, seed) for operand in operands]
        self.slices = [len(rows) for rows in nested]
        rows = list(itertools.chain.from_iterable(nested))
        self.count, self.sizes = len(rows), [row[SIZE.value] for row in rows]
        self.rows = uploads.table(array("q", itertools.chain.from_iterable(rows)), COLUMNS.value)
        self.gradients = uploads.empty((self.count,), "int64")
        self.gradient_bytes = grads[0].element_size()
        self.aligned = all(is_aligned(operands[i], row) for i, of_operand in enumerate(nested) for row in of_operand)
        self.grads_aligned = True
        self.follow(grads)

    def follow(self, grads: Sequence[Tensor]) -> None:
        """Note where the gradients are now."""
        places = array("Q", [g.data_ptr() for g in grads])
        if self.count != len(places):
            slices = [
                place + i * (g.numel() // slices) * g.element_size()
                for place, g, slices in zip(places, grads, self.slices, strict=True)
                for i in range(slices)
            ]
            places = array("Q", slices)
        self.grads_aligned = are_aligned(places)
        self.uploads.refill(self.gradients, places.tolist())


def are_aligned(addresses: array[int]) -> bool:
    """Whether the widest loads can be made from all of them."""
    lowest = addresses.tobytes()[:: addresses.itemsize]  # GPUs' hosts have the lowest byte first
    return not lowest.translate(None, ALIGNED)


def add_up(compiled: Any, partials: Tensor, begins: Tensor, totals: Tensor) -> None:
    """totals (rows, sums) from partials (sums, chunks)."""
    rows, sums = totals.shape
    if rows:
        arguments = partials, begins, totals, partials.shape[1]
        stride = totals.stride(0)
        key = sums, stride
        compiled.run(total_kernel, (rows, sums), arguments, lambda: dict(SUMS=stride, BLOCK=1024), warps=4, key=key)
