"""Parameters with what holds for them, and what is kept for each."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from thalweg.arrays import Shape
from thalweg.boundary import first_state
from thalweg.plan.models import Tensor
from thalweg.settings import Setting
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import BYTES, Ledger

#: Something that is kept for a parameter: its shape and its dtype.
Entry: TypeAlias = tuple[Shape, str]


@dataclass(frozen=True)
class Item:
    """One parameter with what holds for it."""

    tensor: Tensor
    setting: Setting


def state_entries(setting: Setting, tensor: Tensor) -> dict[str, Entry]:
    """Shape and dtype of everything that is kept for a parameter, as its rule makes it."""
    return dict(entries_of(setting, tensor.shape, tensor.dtype))


@functools.lru_cache(maxsize=4096)
def entries_of(setting: Setting, shape: Shape, dtype: str) -> Mapping[str, Entry]:
    p = Ledger().array(shape, dtype)
    state = first_state(shapes, setting.rule_at(1), setting.handling, p)
    return {key: (entry.shape, entry.dtype) for key, entry in state.items()}


def entry_bytes(entry: Entry) -> int:
    shape, dtype = entry
    return math.prod(shape) * BYTES[dtype]
