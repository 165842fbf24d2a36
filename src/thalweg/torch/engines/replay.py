"""Steps that are replayed: launches recorded once as a CUDA graph, and what moves between them copied in one piece.

Kernels find tensors and rates in tables on the device. So a recorded step serves wherever gradients are: a step is one
copy of what has moved, and one replay. Where ranks send messages on the way, there is a graph before each of them and
one after the last.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thalweg.errors import FallbackWarning, warn
from thalweg.spaces.sharded import Asked
from thalweg.torch.sharding.owners import MessageCall

#: Equal steps after which one is recorded, and recorded steps that are kept: with a refresh of factors and without.
WARM, MOST_RECORDED = 3, 4


class ArgumentTable:
    """Addresses of gradients, and rates, of all launches of a run: one table on the host, and one on the device."""

    def __init__(self, device: torch.device, tables: Sequence[Any], rates: int) -> None:
        """tables: of gradients. rates: how many pairs of lr and lr_scale there are."""
        from thalweg.kernels.triton.uploads import Uploads

        self.places, first = {}, 0
        for table in tables:
            self.places[id(table)] = slice(first, first + table.count)
            first += table.count
        self.host = array("Q", bytes(8 * (first + rates)))
        #: The same memory as a tensor: the driver has taken what it copies of it when a copy returns.
        self.view = torch.frombuffer(self.host, dtype=torch.int64)
        self.first = first
        self.device = torch.zeros(first + rates, dtype=torch.int64, device=device)
        self.rates = self.device[first:].view(torch.float32)
        #: Of each pair, where the device finds it.
        self.pairs = [(self.rates[2 * i : 2 * i + 1], self.rates[2 * i + 1 : 2 * i + 2]) for i in range(rates)]
        self.uploads, self.has_news = Uploads(device), True
        for table in tables:
            table.gradients, table.moving = self.device[self.places[id(table)]], self
            table.grad_places = array("Q")  # to be noted anew
        self.known = [(0.0, 0.0)] * rates

    def put(self, place: slice, words: array[int]) -> None:
        if self.host[place] != words:
            self.host[place] = words
            self.has_news = True

    def note(self, table: Any, addresses: array[int]) -> None:
        self.put(self.places[id(table)], addresses)

    def rate(self, place: int, lr: float | None, lr_scale: float) -> tuple[Tensor | None, Tensor]:
        """Where the device finds a rate and what multiplies it."""
        pair = 0.0 if lr is None else lr, lr_scale
        if pair != self.known[place]:
            self.known[place] = pair
            self.host[self.first + place] = int.from_bytes(struct.pack("<2f", *pair), "little")
            self.has_news = True
        rate, scale = self.pairs[place]
        return None if lr is None else rate, scale

    def upload(self) -> None:
        """Copy what has moved, if anything has; always where a user records a graph, whose replays copy it again."""
        if self.has_news or self.uploads.captured or self.uploads.is_capturing():
            self.uploads.refill(self.device, self.view)
            self.has_news = False


#: What happens between launches: sums are asked of other ranks, and written in place, or messages are sent.
Between: TypeAlias = Sequence[Asked] | MessageCall
#: None: all is measured.
Launches: TypeAlias = Iterator[Between | None]


class Recorded(NamedTuple):
    """A recorded step."""

    #: Each with what happens after it; None: it is the last.
    graphs: list[tuple[torch.cuda.CUDAGraph, Between | None]]
    #: What uploads each table, the table, and what this step needs in it: other steps leave other contents.
    tables: list[tuple[Any, Tensor, Tensor]]

    def replay(self, *, is_latest: bool) -> Launches:
        for uploads, table, values in self.tables:
            if not is_latest or uploads.captured:  # or a graph of the user's may have filled it
                uploads.refill(table, values)
        for graph, between in self.graphs:
            if between is None:
                yield None
            graph.replay()
            if between is not None:
                yield between


class Replay:
    """Launches of a run, recorded when they have been the same a few times."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        #: By key: how often a step was launched, and then its graph.
        self.known: dict[Hashable, int | Recorded] = {}
        #: The one whose tables are on the device; None: those of launches.
        self.latest: Recorded | None = None
        self.works = (
            device.type == "cuda" and torch.version.hip is None and os.environ.get("THALWEG_REPLAY", "1") != "0"
        )
        from thalweg.kernels.triton.launching import is_watched

        self.is_watched = is_watched

    def run(self, launch: Callable[[], Launches], key: Hashable) -> Launches:
        """Launch, or replay. key: what a recorded step depends on beside memory that stays where it is."""
        if not self.works or not self.may_record():
            yield from launch()
            self.latest = None
            return
        known = self.known.pop(key, 0)
        if known == WARM:
            known = self.record(launch) or 0
        if isinstance(known, int):
            yield from launch()
            known += 1
            self.latest = None
        else:
            yield from known.replay(is_latest=self.latest is known)
            self.latest = known
        self.known[key] = known  # the last of them: the first are the oldest
        while len(self.known) > MOST_RECORDED:
            del self.known[next(iter(self.known))]

    def may_record(self) -> bool:
        """Not while a user records a graph of the whole step, nor while a profiler wants to see every launch."""
        return not torch.cuda.is_current_stream_capturing() and not self.is_watched()

    def record(self, launch: Callable[[], Launches]) -> Recorded | None:
        from thalweg.kernels.triton.uploads import deferred

        recorded, launches = Recorded([], []), launch()
        token = deferred.set(recorded.tables)
        try:
            with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
                between: Between | None = ()
                pool = torch.cuda.graph_pool_handle()
                while between is not None:
                    graph = torch.cuda.CUDAGraph()
                    # other threads, such as those of data loaders and of NCCL, may go on with what they do
                    graph.capture_begin(pool, capture_error_mode="thread_local")
                    try:
                        if recorded.graphs:
                            torch.zeros(1, device=self.device)  # torch warns of graphs with nothing in them
                        # the last graph goes on where all is measured
                        between = next((pause for pause in launches if pause is not None), None)
                    finally:
                        graph.capture_end()
                    recorded.graphs.append((graph, between))
        except RuntimeError as error:
            self.works = False
            warn(
                f"a step could not be recorded as a CUDA graph ({error}): steps are launched kernel by kernel, with "
                "the same numbers, which takes the host longer; THALWEG_REPLAY=0 does not try",
                FallbackWarning,
            )
            return None
        finally:
            deferred.reset(token)
        return recorded
