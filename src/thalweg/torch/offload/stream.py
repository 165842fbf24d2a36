"""In which order state is brought to a device, stepped, and sent back.

Chunks pass through slots of the device's memory. While one is stepped, the next ones are brought and the one before is
sent back; only the lanes of the device wait, for one another:

    inward     bring 0   bring 1   bring 2   bring 3 (when 0 has left)   ...
    steps                step 0    step 1    step 2                      ...
    outward                        send 0    send 1                      ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from thalweg.errors import OptionError
from thalweg.torch.offload.lanes import Event, Lanes


class Slot:
    """A stretch of a device's memory that chunks pass through, one after the other."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes
        self.room = lanes.on_device(0)
        #: When it can be filled again.
        self.free: Event = lanes.steps.mark()

    def grow(self, size: int) -> None:
        """Have room for a chunk, while nothing is being copied."""
        if self.room.numel() < size:
            self.room = self.lanes.on_device(size)
            self.free = self.lanes.steps.mark()  # what had this memory before may still be at work with it


class Chunk:
    """State that travels together: bytes of the host, and as many of a slot."""

    arrived: Event

    def __init__(self, size: int, slot: Slot, number: int) -> None:
        self.slot, self.lanes = slot, slot.lanes
        #: In the order of chunks.
        self.number = number
        try:
            self.memory = self.lanes.on_host(size)
        except (OSError, RuntimeError) as error:  # of the system, or of the device's driver
            raise OptionError(
                f"offload_state=True cannot pin {size:,} bytes of the host's memory: {error}; "
                "let the process have and lock more of it (ulimit -l), or keep less of it: state_dtype='int8'"
            ) from error
        self.host = torch.frombuffer(self.memory, dtype=torch.uint8)
        slot.grow(size)

    @property
    def room(self) -> Tensor:
        return self.slot.room[: self.host.numel()]

    def place(self, like: Tensor, begin: int) -> Tensor:
        """A tensor of the host like another one, from this byte on.

        It has a storage of its own: torch saves and copies storages as a whole, and none of several dtypes.
        """
        dense = torch.empty_like(like, device="meta")  # whose elements lie side by side, in whatever order
        count = max(1, like.numel())
        flat = torch.frombuffer(self.memory, dtype=like.dtype, count=count, offset=begin)
        return flat.as_strided(dense.shape, dense.stride())

    def on_device(self, entry: Tensor) -> Tensor:
        """Where an entry, which lies in this chunk, is while the chunk is on the device."""
        begin = address_of(entry) - address_of(self.host)
        flat = self.room[begin : begin + entry.nbytes].view(entry.dtype)
        return flat.as_strided(entry.shape, entry.stride())

    def bring(self) -> None:
        self.lanes.inward.wait(self.slot.free)
        self.lanes.inward.copy(self.room, self.host)
        self.arrived = self.lanes.inward.mark()

    def step(self, take: Callable[[], None]) -> None:
        steps = self.lanes.steps
        steps.wait(self.arrived)
        try:
            take()
        finally:
            self.slot.free = steps.mark()

    def send(self) -> Event:
        self.lanes.outward.wait(self.slot.free)
        self.lanes.outward.copy(self.host, self.room)
        self.slot.free = self.lanes.outward.mark()
        return self.slot.free


def address_of(entry: Tensor) -> int:
    """Where the memory of a tensor begins; also of one without elements."""
    return entry.untyped_storage().data_ptr()


def streamed(
    chunks: Sequence[Chunk | None], take: Callable[[int], None], sent: Callable[[Chunk, Event], None] | None
) -> None:
    """Take a turn with each chunk while it is on its device; None: with what is there already.

    sent: told when a chunk will be back; None: nothing is written, so that nothing has to go back.
    """
    ahead = 0
    for turn, chunk in enumerate(chunks):
        while ahead < len(chunks) and not is_taken(chunks[ahead], chunks[turn:ahead]):
            if (coming := chunks[ahead]) is not None:
                coming.bring()
            ahead += 1
        if chunk is None:
            take(turn)
            continue
        chunk.step(lambda turn=turn: take(turn))  # type: ignore[misc]
        if sent is not None:
            sent(chunk, chunk.send())


def is_taken(chunk: Chunk | None, before: Sequence[Chunk | None]) -> bool:
    """Whether one of those before, which are still to be stepped, has the slot of a chunk."""
    return chunk is not None and any(other is not None and other.slot is chunk.slot for other in before)
