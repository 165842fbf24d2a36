"""Steps that are replayed: launches recorded once as a CUDA graph, and what moves between them copied in one piece.

Kernels find tensors and rates in tables on the device. So a recorded step serves wherever gradients are: a step is one
copy of what has moved, and one replay. Where ranks send messages on the way, there is a graph before each of them and
one after the last.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import struct
from array import array
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.errors import FallbackWarning, warn
from thalweg.torch.sharding.stages import Compute, Stage, fix

#: Equal steps after which one is recorded, and recorded steps that are kept: with a refresh of factors and without.
WARM, MOST_RECORDED = 3, 4


class ArgumentTable:
    """All that moves between steps on one device: addresses of gradients, and rates; copied in one piece."""

    def __init__(self, device: torch.device, tables: Sequence[tuple[Any, Sequence[int], array[int]]], rates: int):
        """tables: of gradients, with the place of each row's tensor among all gradients, and where it begins in that.

        rates: how many pairs of lr and lr_scale there are.
        """
        from thalweg.kernels.triton.uploads import Uploads

        self.order = [i for _, places, _ in tables for i in places]
        self.offsets = [offset for *_, offsets in tables for offset in offsets]
        self.is_plain = self.order == list(range(len(self.order))) and not any(self.offsets)
        self.count = len(self.order)
        self.host = array("Q", bytes(8 * (self.count + rates)))
        #: The same memory as a tensor: the driver has taken what it copies of it when a copy returns.
        self.view = torch.frombuffer(self.host, dtype=torch.int64)
        self.device = torch.zeros(self.count + rates, dtype=torch.int64, device=device)
        floats = self.device[self.count :].view(torch.float32)
        #: Of each pair, where the device finds it.
        self.pairs = [(floats[2 * i : 2 * i + 1], floats[2 * i + 1 : 2 * i + 2]) for i in range(rates)]
        self.uploads, self.has_news = Uploads(device), True
        self.spans: list[tuple[Any, slice]] = []
        first = 0
        for table, places, _ in tables:
            self.spans.append((table, slice(first, first + len(places))))
            first += len(places)
            table.gradients = self.device[self.spans[-1][1]]
        #: Whether the widest loads can be made of all gradients, or of those of each table.
        self.alignment: Hashable = None
        self.known = [(0.0, 0.0)] * rates

    def follow(self, addresses: array[int]) -> None:
        """Note where the gradients are."""
        from thalweg.kernels.triton.tables import are_aligned

        if not self.is_plain:
            moved = map(operator.add, map(addresses.__getitem__, self.order), self.offsets)
            addresses = array("Q", moved)
        if self.alignment is not None and self.host[: self.count] == addresses:
            return
        self.host[: self.count] = addresses
        self.has_news = True
        are_all = are_aligned(addresses)
        if are_all and self.alignment is True:
            return
        aligned = [are_all or are_aligned(addresses[span]) for _, span in self.spans]
        for (table, _), is_aligned in zip(self.spans, aligned, strict=True):
            table.grads_aligned = is_aligned
        self.alignment = are_all or tuple(aligned)

    def rate(self, place: int, lr: float | None, lr_scale: float) -> tuple[Tensor | None, Tensor]:
        """Where the device finds a rate and what multiplies it."""
        pair = 0.0 if lr is None else lr, lr_scale
        if pair != self.known[place]:
            self.known[place] = pair
            self.host[self.count + place] = int.from_bytes(struct.pack("<2f", *pair), "little")
            self.has_news = True
        rate, scale = self.pairs[place]
        return None if lr is None else rate, scale

    def upload(self) -> None:
        """Copy what has moved, if anything has; always where a user records a graph, whose replays copy it again."""
        if self.has_news or self.uploads.captured or self.uploads.is_capturing():
            self.uploads.refill(self.device, self.view)
            self.has_news = False


class Recorded(NamedTuple):
    """A recorded step."""

    #: A graph in place of neighbouring stages that launch, and the others as they are.
    stages: list[Stage]
    #: What uploads each table, the table, and what this step needs in it: other steps leave other contents.
    tables: list[tuple[Any, Tensor, Tensor]]


class Recorder:
    """Steps of a plan, recorded when they have been the same a few times."""

    def __init__(self, device: torch.device, key: Callable[[], Hashable]) -> None:
        """key: what a recorded step depends on beside memory that stays where it is."""
        self.device, self.key = device, key
        #: By key: how often a step was launched, and then what was recorded of it.
        self.known: dict[Hashable, int | Recorded] = {}
        #: The one whose tables are on the device; None: those of launches.
        self.latest: Recorded | None = None
        self.works = (
            device.type == "cuda" and torch.version.hip is None and os.environ.get("THALWEG_REPLAY", "1") != "0"
        )
        from thalweg.kernels.triton.launching import is_watched

        self.is_watched = is_watched

    @property
    def recorded(self) -> int:
        """How many kinds of steps are replayed."""
        return sum(isinstance(known, Recorded) for known in self.known.values())

    def choose(self, stages: Sequence[Stage]) -> Sequence[Stage]:
        """The stages of this step: what was recorded of such a step, or these."""
        if not self.works or not self.may_record():
            self.latest = None
            return stages
        key = self.key()
        known = self.known.pop(key, 0)
        if known == WARM:
            known = self.record(stages) or 0
        self.known[key] = known + 1 if isinstance(known, int) else known  # the last of them: the first are the oldest
        while len(self.known) > MOST_RECORDED:
            del self.known[next(iter(self.known))]
        if isinstance(known, Recorded):
            return known.stages
        self.latest = None
        return stages

    def may_record(self) -> bool:
        """Not while a user records a graph of the whole step, nor while a profiler wants to see every launch."""
        return not torch.cuda.is_current_stream_capturing() and not self.is_watched()

    def record(self, stages: Sequence[Stage]) -> Recorded | None:
        from thalweg.kernels.triton.uploads import deferred

        recorded = Recorded([], [])
        recorded.stages.append(Compute("upload tables of this step", functools.partial(self.upload, recorded)))
        token = deferred.set(recorded.tables)
        try:
            stream: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            with on_device(self.device), torch.cuda.stream(stream), without_garbage_collection():
                pool = torch.cuda.graph_pool_handle()
                for launches, alike in itertools.groupby(stages, operator.attrgetter("launches")):
                    neighbours = list(alike)
                    if launches:
                        recorded.stages.append(self.capture(neighbours, pool, is_first=len(recorded.stages) == 1))
                    else:
                        recorded.stages.extend(map(fix, neighbours))
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

    def capture(self, stages: Sequence[Stage], pool: Any, *, is_first: bool) -> Stage:
        """One graph of all that these launch."""
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those of data loaders and of NCCL, may go on with what they do
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            if not is_first:
                torch.zeros(1, device=self.device)  # torch warns of graphs with nothing in them
            for stage in stages:
                stage.run()
        finally:
            graph.capture_end()
        what = f"replay: {'; '.join(stage.what for stage in stages)}"
        return Compute(what, functools.partial(self.replay, graph), any(stage.writes for stage in stages))

    def replay(self, graph: Any) -> None:
        with on_device(self.device):
            graph.replay()

    def upload(self, recorded: Recorded) -> None:
        """Put into tables what a recorded step needs in them."""
        for uploads, table, values in recorded.tables:
            if self.latest is not recorded or uploads.captured:  # or a graph of the user's may have filled it
                uploads.refill(table, values)
        self.latest = recorded


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Garbage may hold recorded graphs, and freeing one would end the recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the device that is current, which may be another than the parameters'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
