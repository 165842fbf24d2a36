"""Launching kernels again and again on the same memory.

Triton looks at every argument of a launch to find out what to compile for, which takes the host longer than many a
kernel runs. A step launches the same kernels on the same tables each time, so what was compiled is kept under a short
key, and called as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import triton

#: Whether compiled kernels of this version of Triton are known to take arguments as they are given here.
DIRECT = triton.__version__.startswith("3.6.")


class Compiled:
    """The kernels of one list of tensors, as they were compiled for it."""

    def __init__(self) -> None:
        self.known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def run(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: Mapping[str, Any],
        *,
        warps: int,
        key: Hashable = (),
    ) -> None:
        """Launch a kernel, whose constants come behind its arguments. key: all that may differ between launches."""
        known = self.known.get((id(kernel), key))  # kernels have a hash that takes its time
        if known is not None:
            compiled, values = known
            compiled[(*grid, 1, 1)[:3]](*arguments, *values)
            return
        compiled = kernel[grid](*arguments, **constants, num_warps=warps)
        if DIRECT and compiled is not None:  # as it is where kernels are interpreted
            values = tuple(constants[name] for name in kernel.arg_names if name in constants)
            self.known[id(kernel), key] = compiled, values


def kind_of(value: Any) -> Hashable:
    """What Triton would compile for, of an argument that changes from step to step."""
    return (value.dtype, value.data_ptr() % 16 == 0) if hasattr(value, "data_ptr") else value is None
