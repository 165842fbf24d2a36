"""Parameters with what holds for them, and what is kept for each."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.plan.models import Tensor
from thalweg.programs import budget
from thalweg.programs.budget import Entry, entry_bytes
from thalweg.settings import Setting

__all__ = ["Entry", "Item", "entry_bytes", "state_entries"]


@dataclass(frozen=True)
class Item:
    """One parameter with what holds for it."""

    tensor: Tensor
    setting: Setting


def state_entries(setting: Setting, tensor: Tensor) -> dict[str, Entry]:
    """Shape and dtype of everything that is kept for a parameter, as its rule makes it."""
    return dict(budget.state_entries(setting, tensor.shape, tensor.dtype))
