"""Launching kernels again and again on the same memory.

Triton looks at every argument of a launch to find out what to compile for, which takes the host longer than many a
kernel runs. A step launches the same kernels on the same tables each time, so what was compiled is kept under a short
key, and called as it is. What a first step needs is compiled side by side.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import triton

from thalweg.errors import FallbackWarning, warn

#: Versions of Triton whose compiled kernels are known to take grid, stream, function, metadata, hooks and arguments in
#: this order. Measured with 3.6 on an H200, 148 small tensors: 0.60 ms of the host's time for a step of LARS, and 0.87
#: through Triton's own layers.
KNOWN = ("3.5.", "3.6.", "3.7.", "3.8.", "3.9.")
DIRECT = triton.__version__.startswith(KNOWN)

Compilation = Callable[[], Any]


class Direct:
    """A compiled kernel that is called at once, on the device that is current.

    Triton's own call asks for device and stream in several layers, and calls hooks before and after each launch even if
    there are none. Those that a profiler has set are called here too.
    """

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.launcher = compiled, compiled.run
        self.device = torch.cuda.current_device()
        self.current_stream = triton.runtime.driver.active.get_current_stream

    def __call__(self, grid: tuple[int, int, int], arguments: tuple[Any, ...]) -> None:
        stream, kernel = self.current_stream(self.device), self.compiled
        if is_watched():
            kernel[grid](*arguments, stream=stream)
        else:
            self.launcher(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)


def is_watched() -> bool:
    """Whether a profiler wants to be called before or after each launch."""
    knobs = getattr(triton, "knobs", None)
    if knobs is None:  # before Triton 3.4
        return False
    before, after = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(before, "calls", before) or getattr(after, "calls", after))


def direct(compiled: Any, *, is_known: bool = DIRECT) -> Callable[[tuple[int, int, int], tuple[Any, ...]], None] | None:
    """How to call a kernel again that was compiled; None: launch it as if it were new. Interpreted ones are None.

    is_known: whether this version of Triton takes arguments as they are given.
    """
    if compiled is None:
        return None
    if not is_known:
        warn_of_version(triton.__version__)
        return None
    if torch.version.hip is not None:
        return lambda grid, arguments: compiled[grid](*arguments)
    return Direct(compiled)


@functools.cache
def warn_of_version(version: str) -> None:
    warn(
        f"thalweg launches kernels of Triton 3.5 to 3.9 directly. With Triton {version} numbers and GPU times are the "
        "same, and the host needs about half as long again for a step",
        FallbackWarning,
    )


class Compiled:
    """The kernels of one list of tensors, as they were compiled for it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        #: While a step is only prepared: how to compile what it would launch.
        self.waiting: list[Compilation] | None = None

    def run(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Callable[[], dict[str, Any]],
        *,
        warps: int,
        key: Hashable = (),
    ) -> None:
        """Launch a kernel, whose constants come behind its arguments. key: all that may differ between launches."""
        remembered = self.known.get((id(kernel), key))  # kernels have a hash that takes its time
        if remembered is not None:
            again, values = remembered
            again((*grid, 1, 1)[:3], arguments + values)
            return
        given = constants()
        if self.waiting is not None:
            self.waiting.append(lambda: kernel.warmup(*arguments, **given, num_warps=warps, grid=grid))
            return
        call = direct(kernel[grid](*arguments, **given, num_warps=warps))
        if call is not None:
            self.known[id(kernel), key] = call, tuple(given[name] for name in kernel.arg_names if name in given)

    @contextlib.contextmanager
    def preparing(self, device: torch.device) -> Iterator[None]:
        """A context in which nothing is launched; at its end, all that would have been launched is compiled."""
        self.waiting = []
        try:
            yield
            compile_side_by_side(self.waiting, device)
        finally:
            self.waiting = None


def compile_side_by_side(compilations: Iterable[Compilation], device: torch.device) -> None:
    """Compile kernels side by side, where Triton can, with what launches them."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if device.type != "cuda" or mode is None:
        return

    def compile_them() -> None:
        with CompilePool(device) as workers, mode(workers):
            for compilation in compilations:
                compilation()

    # Triton notes in its context that it compiles side by side; in a copy, an error leaves nothing of that behind
    contextvars.copy_context().run(compile_them)


class CompilePool(ThreadPoolExecutor):
    """Threads that compile kernels, and what launches them, which Triton compiles from C."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(max_workers=min(16, os.cpu_count() or 1))
        self.device = device
        self.lock = threading.Lock()
        #: Kernels that have been loaded in some variant: what launches one launches all, and is found on disk.
        self.loaded: set[int] = set()

    def submit(self, compilation: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        return super().submit(self.ready, compilation, *args, **named)

    def ready(self, compilation: Callable[..., Any], *args: Any, **named: Any) -> Any:
        kernel = compilation(*args, **named)
        with self.lock:
            is_first = id(kernel.src.fn) not in self.loaded
            self.loaded.add(id(kernel.src.fn))
        if is_first and DIRECT:
            with torch.cuda.device(self.device):
                kernel._init_handles()
        return kernel
