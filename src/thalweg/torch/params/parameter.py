"""One parameter that is stepped, and all that holds for it, before there is memory for its state too."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.kernels.chunks import extent
from thalweg.programs.budget import entry_bytes, state_entries
from thalweg.rules.entries import Spread
from thalweg.settings import ParameterOptions
from thalweg.storage import Kept
from thalweg.torch.params.checks import NAMES

#: Fused code keeps an address table and partial sums: bytes of each tensor, and this part of a tensor in float32.
BYTES_OF_TABLE, PART_OF_SUMS = 2048, 1 / 128
#: Where it sums along rows and columns: bytes of each of them, and this part of the tensor.
BYTES_OF_LINE, PART_OF_LINES = 64, 1 / 16


class Param(NamedTuple):
    """A parameter that is stepped, and what holds for it."""

    name: str
    p: Tensor
    #: The index of its group.
    group: int
    setting: ParameterOptions
    #: Its learning rate, and what multiplies the step size that the rule makes of it.
    lr: Any = None
    factor: float = 1.0
    #: What was not understood about it, or assumed.
    hints: Sequence[str] = ()
    #: The shape of what this rank steps of it; (): it is not asked for.
    shape: Shape = ()

    @property
    def dtype(self) -> str:
        return NAMES[self.p.dtype]

    @property
    def device(self) -> torch.device:
        """``meta`` stands for a GPU that has kernels."""
        return self.p.device

    @property
    def entries(self) -> Mapping[str, Kept]:
        return state_entries(self.setting, self.shape, self.dtype)

    @property
    def extent(self) -> int:
        """The elements by which engines cut lists into chunks."""
        return extent(math.prod(self.shape), (math.prod(shape) for shape, _ in self.entries.values()))

    @property
    def value_bytes(self) -> int:
        """The bytes of a new parameter with its new state."""
        return sum(map(entry_bytes, [(self.shape, self.dtype), *self.entries.values()]))

    @property
    def table_bytes(self) -> int:
        """The bytes that fused code keeps for it from step to step, at most."""
        rule, size = self.setting.rule_at(1), 4 * math.prod(self.shape)
        declared = rule.entries(self.shape).values()
        summed = [entry for entry in declared if isinstance(entry, Spread) and entry.over]
        lines = sum(math.prod(entry.shape(self.shape, rule.stacked_axes)) for entry in summed)
        part = PART_OF_SUMS + (PART_OF_LINES if summed else 0)
        slices = math.prod(self.shape[: rule.stacked_axes])
        return BYTES_OF_TABLE * slices + BYTES_OF_LINE * lines + math.ceil(part * size)


def count_largest(needed: Sequence[tuple[Param, int]], chunk: int) -> int:
    """Bytes of the largest chunk of so many elements, or of one tensor that is larger. needed: those of each."""
    densest = max((bytes_ / p.extent for p, bytes_ in needed), default=0.0)
    sizes = [bytes_ for _, bytes_ in needed]
    return min(sum(sizes), max(0, *sizes, math.ceil(chunk * densest)))
