"""Many tensors in one launch: tables on the device that say where each tensor lies, and which piece is whose.

Tables are built once and follow only what has moved; gradients, which move most, have a column of their own.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.triton.launching import Compiled
from thalweg.kernels.triton.rows import COLUMNS, SIZE, Operand, rows_of, total_kernel

#: Addresses from which the widest loads can be made are multiples of this.
ALIGNMENT = 16
#: The lowest bytes of such addresses.
ALIGNED = bytes(range(0, 256, ALIGNMENT))
#: A device's memory is given out in multiples of this.
BLOCK_BYTES = 512


#: Bytes up to which the driver takes a copy of the host's memory at once, so that it need not be pinned.
STAGED = 2**15
#: While a step is recorded that will be replayed: copies that are made once it is, and not by every replay.
deferred: ContextVar[list[tuple[Tensor, Tensor]] | None] = ContextVar("deferred", default=None)


def in_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


class Uploads:
    """Copies of host tables on a device, made without waiting.

    A copy that becomes part of a CUDA graph is made again at every replay, from the same memory of the host: that is
    kept, and a spare one is laid by, since none can be had while a graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pinned = device.type == "cuda"
        self.spare: Tensor | None = None
        self.captured: list[Tensor] = []
        #: Bytes of the device that are kept from step to step, in the blocks that they come in.
        self.kept_bytes = 0

    def keep(self, memory: Tensor) -> Tensor:
        """Count memory that is kept from step to step."""
        self.kept_bytes += in_blocks(memory.nbytes)
        return memory

    def drop(self, memory: Tensor) -> None:
        """Count memory no longer."""
        self.kept_bytes -= in_blocks(memory.nbytes)

    def is_capturing(self) -> bool:
        return self.pinned and torch.cuda.is_current_stream_capturing()

    def table(self, values: Tensor) -> Tensor:
        """A table that is made once."""
        return self.keep((values.pin_memory() if self.pinned else values).to(self.device, non_blocking=True))

    def refill(self, table: Tensor, values: Sequence[int] | Tensor) -> None:
        """New numbers for a table, in place."""
        host = torch.as_tensor(values, dtype=table.dtype)
        later = deferred.get()
        if later is not None:
            later.append((table, host.clone()))
            return
        if self.pinned:
            if not self.is_capturing():
                if host.nbytes > STAGED:
                    host = host.pin_memory()
                if self.spare is None or self.spare.numel() < host.nbytes:
                    self.spare = torch.empty(host.nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                place = self.spare if self.spare is not None else torch.empty_like(host, pin_memory=True)
                host, self.spare = place.view(torch.uint8)[: host.nbytes].view(host.dtype).copy_(host), None
                self.captured.append(host)
        table.copy_(host, non_blocking=True)


class Tables:
    """Rows and chunks of some operands."""

    def __init__(
        self,
        operands: Sequence[Operand],
        grads: Sequence[Tensor],
        keys: Sequence[str],
        stacked_axes: int,
        seed: int,
        chunk: int,
    ) -> None:
        self.operands = operands
        self.device = operands[0].p.device
        self.uploads = Uploads(self.device)
        by_operand = [rows_of(operand, keys, stacked_axes, seed) for operand in operands]
        self.slices = [len(rows) for rows in by_operand]
        self.count = sum(self.slices)
        rows = torch.tensor([row for own in by_operand for row in own], dtype=torch.int64).reshape(-1, COLUMNS.value)
        sizes = rows[:, SIZE.value]
        chunks = (sizes + (chunk - 1)) // chunk
        ends = torch.cumsum(chunks, 0)
        owners = torch.repeat_interleave(torch.arange(self.count), chunks)
        pieces = torch.arange(int(chunks.sum())) - (ends - chunks)[owners]
        self.chunk_count = len(pieces)
        self.rows = self.uploads.table(rows)
        #: By chunk: whose it is, and which of its owner's.
        self.chunks = self.uploads.table(torch.stack([owners, pieces], 1).to(torch.int32).contiguous())
        #: By row: where its chunks begin in the list of all, with the end of the last behind them.
        self.begins = self.uploads.table(torch.cat([torch.zeros(1, dtype=torch.int64), ends]).to(torch.int32))
        self.gradients = self.uploads.keep(torch.empty(self.count, dtype=torch.int64, device=self.device))
        #: What copies the addresses of gradients to the device, with those of other tables; None: each by itself.
        self.moving: Any = None
        self.aligned = all(address % ALIGNMENT == 0 for address in rows[:, : SIZE.value].flatten().tolist())
        self.grads_aligned = True
        self.grad_places = array("Q")
        self.follow(grads)

    def follow(self, grads: Sequence[Tensor], places: array[int] | None = None) -> None:
        """Note where the gradients are now. places: their addresses, if they are known."""
        places = array("Q", map(Tensor.data_ptr, grads)) if places is None else places
        # a graph carries its own copy along, which its replays leave in the table
        if places == self.grad_places and not self.uploads.captured and not self.uploads.is_capturing():
            return
        self.grad_places = places
        if self.count != len(places):
            slices = [
                place + i * (g.numel() // slices) * g.element_size()
                for place, g, slices in zip(places, grads, self.slices, strict=True)
                for i in range(slices)
            ]
            places = array("Q", slices)
        self.grads_aligned = are_aligned(places)
        if self.moving is not None:
            self.moving.note(self, places)
        else:
            self.uploads.refill(self.gradients, places.tolist())


def are_aligned(addresses: array[int]) -> bool:
    """Whether the widest loads can be made from all of them."""
    lowest = addresses.tobytes()[:: addresses.itemsize]  # GPUs' hosts have the lowest byte first
    return not lowest.translate(None, ALIGNED)


def add_up(compiled: Compiled, partials: Tensor, begins: Tensor, totals: Tensor) -> None:
    """totals (rows, sums) from partials (sums, chunks)."""
    rows, sums = totals.shape
    if rows:
        arguments = partials, begins, totals, partials.shape[1]
        stride = totals.stride(0)
        key = sums, stride
        compiled.run(total_kernel, (rows, sums), arguments, lambda: dict(SUMS=stride, BLOCK=1024), warps=4, key=key)
