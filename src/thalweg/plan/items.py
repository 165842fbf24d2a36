"""Parameters with what holds for them, and what is kept for each."""

from __future__ import annotations

from dataclasses import dataclass

from thalweg.arrays import Shape
from thalweg.plan.models import Tensor
from thalweg.programs import budget
from thalweg.programs.budget import entry_bytes
from thalweg.settings import Setting
from thalweg.storage import Kept as Entry

__all__ = ["Entry", "Item", "entry_bytes", "state_entries"]


@dataclass(frozen=True)
class Item:
    """One parameter, or the shard of one, with what holds for it."""

    tensor: Tensor
    setting: Setting
    #: The shape of the whole parameter, if this is a shard.
    whole: Shape | None = None

    @property
    def entries(self) -> dict[str, Entry]:
        return state_entries(self.setting, self.tensor, self.whole)


def state_entries(setting: Setting, tensor: Tensor, whole: Shape | None = None) -> dict[str, Entry]:
    """Shape and dtype of everything that is kept for a parameter, or for a shard of one that has the shape ``whole``.

    Of Kron's factors, a rank keeps rows.
    """
    if whole is None:
        return dict(budget.state_entries(setting, tensor.shape, tensor.dtype))
    return dict(budget.state_entries(setting, whole, tensor.dtype, tensor.shape))
