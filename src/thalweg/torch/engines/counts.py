"""Counts that the host keeps of some parameters."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_float

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import is_here
from thalweg.kernels.cpu.tables import Counts


class HostCounts:
    """A count of each of some parameters; native code reads and advances those that it can."""

    def __init__(self, counts: Sequence[Tensor]) -> None:
        self.counts = counts
        is_plain = is_here() and all(count.is_cpu and count.dtype == torch.float32 for count in counts)
        self.native = Counts(map(Tensor.data_ptr, counts)) if is_plain else None

    @functools.cached_property
    def numbers(self) -> list[c_float]:
        return [c_float.from_address(count.data_ptr()) for count in self.counts]

    def read(self) -> float | None:
        """What all of them are; None if they differ."""
        if self.native is not None:
            return self.native.read()
        values = set(map(float, self.counts))
        return values.pop() if len(values) == 1 else None

    def write(self, count: float) -> None:
        if self.native is None:
            for tensor in self.counts:
                tensor.fill_(count)
        else:
            for number in self.numbers:
                number.value = count

    def advance(self) -> None:
        if self.native is not None:
            self.native.advance()
        else:
            torch._foreach_add_(list(self.counts), 1)
