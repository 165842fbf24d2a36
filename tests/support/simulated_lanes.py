"""Lanes of a device that is not there, for the tests of what streams state through it.

Copies are made as late as possible: when somebody waits for them. So numbers are wrong where a wait is missing. And
every lane knows what has happened before its next action; two that touch the same bytes, one of them writing, without
one being known to come first, are a race.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from thalweg.torch.offload.lanes import LANES

#: How much of each lane's work is known to be done.
Clock = Counter


class Race(AssertionError):
    pass


class SimulatedEvent:
    def __init__(self, lane: SimulatedLane) -> None:
        self.lane, self.position, self.clock = lane, len(lane.queue), lane.clock.copy()

    def reach(self) -> None:
        while self.lane.done < self.position:
            self.lane.done += 1
            self.lane.queue[self.lane.done - 1]()

    def synchronize(self) -> None:
        self.reach()
        self.lane.lanes.host |= self.clock


class SimulatedLane:
    def __init__(self, lanes: SimulatedLanes, name: str) -> None:
        self.lanes, self.name = lanes, name
        self.clock: Clock = Clock()
        self.queue: list[Callable[[], Any]] = []
        self.done = 0

    def tick(self) -> Clock:
        """Something that this lane does, after all that the host did before it asked for it."""
        self.clock |= self.lanes.host
        self.clock[self.name] += 1
        return self.clock

    def copy(self, into: torch.Tensor, source: torch.Tensor) -> None:
        now = self.tick()
        self.lanes.touch(source, self.name, now, writes=False)
        self.lanes.touch(into, self.name, now, writes=True)
        self.queue.append(lambda: into.copy_(source))

    def mark(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def wait(self, event: SimulatedEvent) -> None:
        if self.name in self.lanes.deaf:
            return
        self.clock |= event.clock
        if self.name == "steps":  # whose work is done when it is given
            event.reach()
        else:
            self.queue.append(event.reach)


class SimulatedLanes:
    """deaf: lanes that do not wait, as if it had been forgotten."""

    def __init__(self, deaf: tuple[str, ...] = ()) -> None:
        self.deaf = deaf
        self.inward, self.outward, self.steps = (SimulatedLane(self, name) for name in ("inward", "outward", "steps"))
        self.host: Clock = Clock()
        self.touched: dict[int, list[tuple[range, str, int, bool]]] = {}
        #: Bytes of the device, and those of the host.
        self.rooms: list[int] = []
        self.pinned: list[int] = []
        #: How many bytes the host can pin.
        self.most_pinned = 2**40

    def on_device(self, size: int) -> torch.Tensor:
        self.rooms.append(size)
        return torch.full((max(1, size),), 0xFF, dtype=torch.uint8)[:size]  # NaN, wherever it is read too soon

    def on_host(self, size: int) -> bytearray:
        if sum(self.pinned) + size > self.most_pinned:
            raise OSError("Cannot allocate memory")
        self.pinned.append(size)
        return bytearray(size)

    def touch(self, memory: torch.Tensor, who: str, now: Clock, *, writes: bool) -> None:
        bytes_ = range(memory.storage_offset(), memory.storage_offset() + memory.numel())
        known = self.touched.setdefault(memory.untyped_storage().data_ptr(), [])
        for others, other, when, wrote in known:
            overlap = max(bytes_.start, others.start) < min(bytes_.stop, others.stop)
            if overlap and (writes or wrote) and now[other] < when:
                raise Race(f"{who} may touch what {other} is not done with")
        known.append((bytes_, who, now[who], writes))

    def step(self, memory: torch.Tensor) -> None:
        """Read and write something on the device."""
        self.touch(memory, "steps", self.steps.tick(), writes=True)

    def look(self, memory: torch.Tensor) -> None:
        """Read something as the host does."""
        self.host["host"] += 1
        self.touch(memory, "host", self.host, writes=False)


@contextmanager
def simulated(deaf: tuple[str, ...] = ()) -> Iterator[SimulatedLanes]:
    """Within: tensors of the CPU have their state on "the host", in memory of its own, and pass such lanes."""
    lanes = SimulatedLanes(deaf)
    LANES["cpu"] = lambda _: lanes
    try:
        yield lanes
    finally:
        del LANES["cpu"]
