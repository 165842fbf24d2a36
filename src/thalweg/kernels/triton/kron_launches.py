"""Launches that are the same from step to step: compiled together, and repeated without looking at them again.

Triton binds and inspects all arguments of a launch, which takes longer than many a kernel runs. A launch whose
arguments stay as they were is handed to the compiled kernel at once.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton

from thalweg.kernels.triton.launching import DIRECT


class Launch:
    """A kernel with all of its arguments."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        self.kernel, self.grid, self.given = kernel, (*grid, 1, 1)[:3], given
        self.run: Any = None
        self.arguments: list[Any] = []

    def __call__(self, **changed: Any) -> None:
        """changed: numbers and tensors that are others this time, of the same kind as before."""
        if self.run is not None:
            if changed:
                self.given |= changed
                self.arguments = [self.given[name] for name in self.kernel.arg_names]
            self.run(*self.arguments)
            return
        self.given |= changed
        compiled = self.kernel[self.grid](**self.given)
        if DIRECT and compiled is not None:  # as it is when kernels are interpreted
            self.arguments = [self.given[name] for name in self.kernel.arg_names]
            self.run = compiled[self.grid]

    def prepare(self) -> None:
        """Compile without launching."""
        self.kernel.warmup(**self.given, grid=self.grid)


class Launches:
    """A list of launches that follow each other."""

    def __init__(self) -> None:
        self.list: list[Launch] = []
        self.ready = False

    def add(self, kernel: Any, /, *grid: int, **given: Any) -> None:
        self.list.append(Launch(kernel, grid, given))

    def __call__(self) -> None:
        compile_together([self])
        for launch in self.list:
            launch()


def compile_together(lists: Sequence[Launches]) -> None:
    """Compile all that these launches need and that is not yet, at once, where that can be done."""
    waiting = [launch for launches in lists if not launches.ready for launch in launches.list]
    for launches in lists:
        launches.ready = True
    together = getattr(triton, "AsyncCompileMode", None)
    if not waiting or together is None or not hasattr(waiting[0].kernel, "device_caches"):
        return
    waiting.sort(key=lambda launch: "BK" not in launch.given)  # products take longest, so they come first
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as workers, together(workers):
        for launch in waiting:
            launch.prepare()
