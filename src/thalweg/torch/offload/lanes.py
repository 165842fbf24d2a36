"""What copies between a device and its host go through: two streams beside the one of the steps, and pinned memory."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

#: A moment of a lane.
Event: TypeAlias = torch.cuda.Event


class Lane:
    """Work that a device does in its order, while the host goes on: a stream of a GPU."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def copy(self, into: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.stream):
            into.copy_(source, non_blocking=True)

    def mark(self) -> Event:
        """The moment at which all is done that this lane was given so far."""
        event: Event = self.stream.record_event()
        return event

    def wait(self, event: Event) -> None:
        """Do what is given from now on after a moment of another lane. The host does not wait."""
        self.stream.wait_event(event)


class Lanes:
    """The lanes of a device, and memory for what travels: copies in both directions go on at once, beside kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.inward, self.outward = (Lane(torch.cuda.Stream(device)) for _ in range(2))  # type: ignore[no-untyped-call]

    @property
    def steps(self) -> Lane:
        """The lane in which steps are taken now."""
        return Lane(torch.cuda.current_stream(self.device))

    def on_device(self, size: int) -> Tensor:
        """So many bytes, for all lanes to use."""
        room = torch.empty(size, dtype=torch.uint8, device=self.device)
        for lane in (self.inward, self.outward):
            room.record_stream(lane.stream)  # so that freed memory is not given to others before copies are done
        return room

    def on_host(self, size: int) -> PinnedMemory:
        """So many bytes from which, and into which, copies are made while the host goes on."""
        return PinnedMemory(size, self.device)


class PinnedMemory(mmap.mmap):
    """Memory of the host that a GPU copies by itself. torch's own pinned memory comes in powers of two.

    It is shared by processes that are forked, so that a fork leaves it where it is.
    """

    def __new__(cls, size: int, device: torch.device) -> PinnedMemory:
        made: PinnedMemory = super().__new__(cls, -1, size)
        made.device = device
        # Written by all threads of torch: pages that are not there yet the driver would have made one after the other.
        made.address = torch.frombuffer(made, dtype=torch.uint8).zero_().data_ptr()
        with torch.cuda.device(device):
            torch.cuda.check_error(cuda_runtime().cudaHostRegister(made.address, len(made), 0))
        made.registered = True
        return made

    device: torch.device
    address: int
    registered = False

    def __del__(self) -> None:
        if self.registered and not sys.is_finalizing():
            with torch.cuda.device(self.device):
                torch.cuda.synchronize()  # a copy may be under way
                cuda_runtime().cudaHostUnregister(self.address)


def is_capturing() -> bool:
    """Whether what is given to a GPU now is recorded by a graph and not done."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def cuda_runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


#: By type of device, what makes its lanes. State of parameters on others stays where it is.
LANES: dict[str, Callable[[torch.device], Lanes]] = {"cuda": Lanes}
