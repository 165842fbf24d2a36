"""Many tensors in one launch: tables on the device that say where each tensor lies, and which piece is whose.

A *row* is one tensor, or one slice of a stack. A *chunk* is a run of CHUNK elements of a row, the work of one program.
Tables are built once and follow only what has moved; gradients, which move most, have a column of their own.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from thalweg.boundary import ROUNDING_STREAM, state_streams
from thalweg.kernels.triton.launching import Compiled
from thalweg.kernels.triton.numbers import random_bits, random_bits_behind, widened
from thalweg.programs.reasons import ROOM
from thalweg.rules.noise import stream_key, tensor_id

# Columns of the table of rows. There are keys of random bits, and scales of codes, for the parameter and each entry.
P, STATE, RECORD, SIZE, POSITION, WIDTH, WHOLE_WIDTH, STEP, KEYS, SCALES, COLUMNS = (
    tl.constexpr(c) for c in (0, 1, 4, 5, 6, 7, 8, 9, 10, 14, 18)
)
#: Addresses from which the widest loads can be made are multiples of this.
ALIGNMENT = 16
#: The lowest bytes of such addresses.
ALIGNED = bytes(range(0, 256, ALIGNMENT))
#: A device's memory is given out in multiples of this.
BLOCK_BYTES = 512


class Operand(NamedTuple):
    """One parameter: its memory, and where its elements are in the whole, if this is a part of it."""

    name: str
    p: Tensor
    #: In the order of the kernels; None: there is none.
    entries: tuple[Tensor | None, ...]
    step: Tensor
    #: Of the parameter and of each entry, where they are codes.
    scales: tuple[Tensor | None, ...] = ()
    #: Of what rounding has cost the parameter.
    record: Tensor | None = None
    #: Of the first element in the whole parameter.
    position: int = 0
    #: Elements that follow each other here, and how far on the next run of them is in the whole; 0: all do.
    width: int = 0
    whole_width: int = 0
    #: Of the whole parameter; None: this is it.
    shape: tuple[int, ...] | None = None


def rows_of(operand: Operand, keys: Sequence[str], stacked_axes: int, seed: int) -> list[list[int]]:
    """The rows of one operand: one for each stacked slice, which are tensors by themselves. keys: of its entries."""
    p = operand.p
    size = math.prod(p.shape[stacked_axes:])
    slices = math.prod(p.shape[:stacked_axes])
    drawn = state_streams(keys)
    streams = [ROUNDING_STREAM, *(drawn[key][0] for key in keys)]
    bits = [stream_key(seed, tensor_id(operand.name), stream) for stream in streams]

    def address(tensor: Tensor | None, index: int) -> int:
        if tensor is None or not slices:
            return 0
        return tensor.data_ptr() + index * (tensor.numel() // slices) * tensor.element_size()

    nothing = (None,) * (1 + ROOM)
    tensors = (p, *(*operand.entries, *nothing)[:ROOM], operand.record)
    scales = (*operand.scales, *nothing)[: 1 + ROOM]
    return [
        [
            *(address(tensor, i) for tensor in tensors),
            size,
            operand.position + i * size,
            operand.width or size or 1,
            operand.whole_width or size or 1,
            operand.step.data_ptr(),
            *(*bits, *[0] * ROOM)[: 1 + ROOM],
            *(address(tensor, i) for tensor in scales),
        ]
        for i in range(slices)
    ]


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


# ---- what programs do with tables


@triton.jit
def address(rows, row, column: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a row's parameter or one of its state entries lies."""
    return pointer(tl.load(rows + row * COLUMNS + column), DTYPE, ALIGNED)


@triton.jit
def pointer(number, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    place = number.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        place = tl.multiple_of(place, 16)
    return place


@triton.jit
def loaded(place, mask):
    """Numbers in memory as float32; 0 where the mask says that there are none."""
    if mask is None:
        return widened(tl.load(place))
    else:
        return tl.load(place, mask, other=0.0).to(tl.float32)


@triton.jit
def positions(rows, row, index, SPREAD: tl.constexpr):
    """Where elements of a row are in the whole parameter, for random bits. SPREAD: not all follow each other there."""
    first = tl.load(rows + row * COLUMNS + POSITION)
    if SPREAD:
        width = tl.load(rows + row * COLUMNS + WIDTH)
        return first + (index // width) * tl.load(rows + row * COLUMNS + WHOLE_WIDTH) + index % width
    else:
        return first + index


@triton.jit
def step_number(rows, row, mask=None):
    """The number of this step, from 1, as float32: the state has that of the last one."""
    place = tl.load(rows + row * COLUMNS + STEP, mask).to(tl.pointer_type(tl.float32))
    return tl.load(place, mask) + 1.0


@triton.jit
def draws_of(rows, row, which: tl.constexpr, first, index, t, SPREAD: tl.constexpr):
    """32 random bits for elements, index behind the first: those of a parameter (0), or of an entry, at step t."""
    key, t = tl.load(rows + row * COLUMNS + KEYS + which).to(tl.uint32), t.to(tl.uint32)
    if SPREAD or index.dtype != tl.int32:
        return random_bits(key, t, positions(rows, row, first + index, SPREAD))
    else:
        return random_bits_behind(key, t, tl.load(rows + row * COLUMNS + POSITION) + first, index)


@triton.jit
def total_kernel(partials, begins, totals, count, SUMS: tl.constexpr, BLOCK: tl.constexpr):
    """Add up what the chunks of a row have found, in an order that is always the same."""
    row, which = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(begins + row), tl.load(begins + row + 1)
    found = tl.zeros((BLOCK,), tl.float32)
    while first < end:
        index = first + tl.arange(0, BLOCK)
        found += tl.load(partials + which.to(tl.int64) * count + index, index < end, other=0.0)
        first += BLOCK
    tl.store(totals + row * SUMS + which, tl.sum(found))


def add_up(compiled: Compiled, partials: Tensor, begins: Tensor, totals: Tensor) -> None:
    """totals (rows, sums) from partials (sums, chunks)."""
    rows, sums = totals.shape
    if rows:
        arguments = partials, begins, totals, partials.shape[1]
        stride = totals.stride(0)
        key = sums, stride
        compiled.run(total_kernel, (rows, sums), arguments, lambda: dict(SUMS=stride, BLOCK=1024), warps=4, key=key)
