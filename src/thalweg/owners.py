"""Which rank owns which tensor, where a rule needs whole tensors and parameters are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence


def owners_of(tensors: Sequence[tuple[str, int]], ranks: int) -> list[int]:
    """The rank that owns each tensor, told by its name and cost: the most work first, to the rank with the least."""
    load, found = [0] * ranks, [0] * len(tensors)
    for index in sorted(range(len(tensors)), key=lambda i: (-tensors[i][1], tensors[i][0])):
        found[index] = owner = min(range(ranks), key=load.__getitem__)
        load[owner] += tensors[index][1]
    return found


def is_remembered(on_nonfinite: str) -> bool:
    """Whether owners keep whole factors from step to step: not if a step may turn out not to be taken."""
    return on_nonfinite == "propagate"
