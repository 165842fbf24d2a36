"""Launches that are the same from step to step: compiled together, and repeated without looking at them again."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from thalweg.kernels.triton.launching import compile_side_by_side, direct


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
        if self.described and self.device.type == "cuda":
            contextvars.copy_context().run(self.launch_with_memory)
        else:
            self.launch()

    def launch(self) -> None:
        for launch in self.list:
            launch()

    def launch_with_memory(self) -> None:
        """Descriptors of tiles take some memory, for which Triton asks whoever is named in its context."""
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
