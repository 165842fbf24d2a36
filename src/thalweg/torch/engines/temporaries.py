"""How much memory a step needs beside parameters, gradients and state, at most.

Each engine is asked for what it works on at a time. The numbers are bounds, not forecasts: a model whose temporaries
fit will step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from thalweg.arrays import Shape
from thalweg.dtypes import DTYPES
from thalweg.kernels import triton as kernels
from thalweg.kernels.chunks import CHUNK, FACTORS_CHUNK, WHOLE_CHUNK, extent
from thalweg.kernels.cpu import library
from thalweg.kernels.cpu import reasons as by_native
from thalweg.kernels.threads import num_threads
from thalweg.kernels.triton import served as by_kernels
from thalweg.programs.budget import entry_bytes, state_entries
from thalweg.rules.entries import PerSlice, Spread
from thalweg.settings import Setting
from thalweg.storage import Kept, arithmetic
from thalweg.torch.params.checks import NAMES
from thalweg.torch.params.groups import EngineName
from thalweg.torch.sharding.shards import local

#: Numbers of the arithmetic's precision that lists have alive for each element at most, beside new values; and those of
#: rules that need whole tensors, or where rounding at random makes bits.
NUMBERS_OF_LISTS, NUMBERS_OF_WHOLE = 16, 20
#: Fused code keeps an address table and partial sums: bytes of each tensor, and this part of a tensor in float32.
BYTES_OF_TABLE, PART_OF_SUMS = 2048, 1 / 128
#: Where it sums along rows and columns: bytes of each of them, and this part of the tensor.
BYTES_OF_LINE, PART_OF_LINES = 64, 1 / 16
#: Bytes that a thread of native code, a list of tensors on a GPU and a library's products there need for themselves.
BYTES_OF_THREAD, BYTES_OF_LIST, BYTES_OF_LIBRARY = 2**16, 2**14, 2**25


class Stepped(NamedTuple):
    """A parameter, or the shard of one, that is stepped."""

    shape: Shape
    dtype: str
    setting: Setting
    #: The type of its device; ``meta`` stands for a GPU with Triton.
    device: str = "meta"

    @property
    def on_gpu(self) -> bool:
        return self.device == "meta" or self.device in kernels.DEVICES

    @property
    def entries(self) -> dict[str, Kept]:
        return dict(state_entries(self.setting, self.shape, self.dtype))

    @property
    def extent(self) -> int:
        """The elements by which engines cut lists into chunks."""
        return extent(math.prod(self.shape), (math.prod(shape) for shape, _ in self.entries.values()))

    @property
    def value_bytes(self) -> int:
        """Of a new parameter with its new state."""
        return sum(map(entry_bytes, [(self.shape, self.dtype), *self.entries.values()]))


def stepped_of(p: Tensor, setting: Setting) -> Stepped:
    """A parameter as this process steps it: its shard, or all of it for a rule that needs whole tensors."""
    shape = tuple(p.shape if setting.rule.needs_whole else local(p).shape)
    return Stepped(shape, NAMES[p.dtype], setting, p.device.type)


def count_temporaries(params: Iterable[Stepped], engine: EngineName) -> int:
    """Bytes that a step of these parameters needs, at most."""
    by_lists, in_stacks, fused = list[Stepped](), list[Stepped](), list[Stepped]()
    for p in params:
        is_fused = engine in ("auto", "fused") and can_be_fused(p)
        if is_fused and not p.setting.rule.needs_whole:
            fused.append(p)
        else:
            (in_stacks if is_fused and p.on_gpu else by_lists).append(p)
    return max(count_lists(by_lists), count_stacks(in_stacks)) + count_tables([*fused, *in_stacks])


def can_be_fused(p: Stepped) -> bool:
    """Whether fused code steps a parameter; that of rules that need whole tensors is lists on a CPU."""
    if p.on_gpu:
        kind = p.setting, p.shape, p.dtype, p.entries
        return not by_kernels.reason_against(*kind) or by_kernels.can_be_parted(*kind)
    unserved = by_native.reason_unserved(p.setting.rule_at(1), p.setting.handling, p.shape, p.dtype)
    return not unserved and library.reason_missing() is None


def count_lists(params: Sequence[Stepped]) -> int:
    """A chunk while it is computed, with its new values and those of the chunk before."""
    needed = []
    for p in params:
        is_wide = p.setting.rule.needs_whole or p.setting.handling.is_random
        numbers = (NUMBERS_OF_WHOLE if is_wide else NUMBERS_OF_LISTS) * p.extent
        needed.append(numbers * DTYPES[arithmetic(p.dtype)].bytes + 2 * p.value_bytes + BYTES_OF_LIST)
    # nothing is written before all is known to be finite
    waiting = sum(p.value_bytes for p in params if p.setting.handling.on_nonfinite == "raise")
    return count_largest(params, needed, CHUNK) + waiting


def count_stacks(params: Sequence[Stepped]) -> int:
    """A stack while its rule transforms it, with float32 copies of the state that has a shape of its own."""
    most = 0
    for chunk, has_factors in ((FACTORS_CHUNK, True), (WHOLE_CHUNK, False)):
        stacked = [p for p in params if p.setting.rule.has_factors is has_factors]
        most = max(most, count_largest(stacked, list(map(count_transform, stacked)), chunk))
    return most + BYTES_OF_LIBRARY if params else 0


def count_transform(p: Stepped) -> int:
    rule: Any = p.setting.rule_at(1)
    copies = [math.prod(p.entries[key][0]) for key in rule.keys(p.shape, PerSlice)]
    size: int = rule.count_temporaries() * DTYPES[rule.whole_dtype(arithmetic(p.dtype))].bytes * p.extent
    return size + 4 * sum(copies)


def count_largest(params: Sequence[Stepped], needed: Sequence[int], chunk: int) -> int:
    """Bytes of the largest chunk of some parameters: of so many elements, or of one that is larger.

    needed: the bytes of each of the parameters.
    """
    if not params:
        return 0
    densest = max(bytes_ / p.extent for p, bytes_ in zip(params, needed, strict=True))
    return min(sum(needed), max(*needed, math.ceil(chunk * densest)))


def count_tables(params: Sequence[Stepped]) -> int:
    """What fused code keeps from step to step."""
    total = 0
    if any(p.on_gpu for p in params):
        total += BYTES_OF_LIST
    if not all(p.on_gpu for p in params):
        total += BYTES_OF_THREAD * num_threads(torch.get_num_threads)
    for p in params:
        rule, size = p.setting.rule_at(1), 4 * math.prod(p.shape)
        lines = [
            math.prod(entry.shape(p.shape, rule.stacked_axes))
            for entry in rule.entries(p.shape).values()
            if isinstance(entry, Spread) and entry.over
        ]
        total += BYTES_OF_TABLE * math.prod(p.shape[: rule.stacked_axes]) + math.ceil(PART_OF_SUMS * size)
        if lines:
            total += BYTES_OF_LINE * sum(lines) + math.ceil(PART_OF_LINES * size)
    return total
