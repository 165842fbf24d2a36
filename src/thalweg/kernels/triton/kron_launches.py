"""Launches that are the same from step to step: compiled together, and repeated without looking at them again.

All that changes from step to step is in tables on the device. So a list of launches that has run before is recorded as
a CUDA graph, and later steps replay it: a model of many shapes, such as ResNet-50, has over a thousand launches a step.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from thalweg.kernels.triton.launching import compile_side_by_side, direct, is_watched


class Launch:
    """A kernel with all of its arguments."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        self.kernel, self.grid, self.given = kernel, (*grid, 1, 1)[:3], given
        self.again: Callable[..., None] | None = None
        self.arguments: tuple[Any, ...] = ()

    def __call__(self, **changed: Any) -> None:
        """changed: numbers and tensors that are others this time, of the same kind as before."""
        self.given |= changed
        if changed or not self.arguments:
            self.arguments = tuple(self.given[name] for name in self.kernel.arg_names)
        if self.again is None:
            self.again = direct(self.kernel[self.grid](**self.given))
        else:
            self.again(self.grid, self.arguments)

    def prepare(self) -> None:
        """Compile without launching."""
        self.kernel.warmup(**self.given, grid=self.grid)


class Launches:
    """A list of launches that follow each other."""

    def __init__(self) -> None:
        self.list: list[Launch] = []
        self.ready = False
        #: Whether they have been launched once, which loads the kernels: what is loaded late cannot be recorded.
        self.warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        #: Whether products are among them for which the GPU fetches tiles by itself.
        self.described = False

    def add(self, kernel: Any, /, *grid: int, **given: Any) -> None:
        self.list.append(Launch(kernel, grid, given))
        self.described = self.described or given.get("DESCRIBED", False)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.list[0].given["places"].device
        return device

    def __call__(self) -> None:
        compile_together([self])
        if not self.can_be_recorded():
            self.launch_all()
        elif not self.warm:
            self.warm = True
            self.launch_all()
        else:
            if self.graph is None:
                self.graph = self.recorded()
            self.graph.replay()

    def can_be_recorded(self) -> bool:
        """Not while a user records a graph of the whole step, nor while a profiler wants to see every launch."""
        return (
            self.device.type == "cuda"
            and torch.version.hip is None
            and not torch.cuda.is_current_stream_capturing()
            and not is_watched()
        )

    def recorded(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            # other threads, such as those of data loaders and of NCCL, may go on with what they do
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.launch_all()
            finally:
                graph.capture_end()
        return graph

    def launch_all(self) -> None:
        if self.described and self.device.type == "cuda":
            contextvars.copy_context().run(self.launch_with_memory)
        else:
            self.launch()

    def launch(self) -> None:
        for launch in self.list:
            launch()

    def launch_with_memory(self) -> None:
        """Descriptors of tiles take some memory, for which Triton asks the allocator in its context."""
        triton.set_allocator(lambda size, _, __: torch.empty(size, dtype=torch.int8, device=self.device))
        self.launch()


def compile_together(lists: Sequence[Launches]) -> None:
    """Compile all that these launches need and that is not yet."""
    waiting = [launch for launches in lists if not launches.ready for launch in launches.list]
    for launches in lists:
        launches.ready = True
    if waiting:
        waiting.sort(key=lambda launch: "BK" not in launch.given)  # products take longest, so they come first
        compile_side_by_side([launch.prepare for launch in waiting], lists[0].device)
