"""Gradients of several steps added up in float32, or in float64 for such parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.storage import ACCUMULATED
from thalweg.torch.sharding.shards import local

States = Mapping[Tensor, Mapping[str, Tensor]]
Groups = Sequence[dict[str, Any]]


class Accumulation:
    """The gradients of an optimizer that wait for a step.

    Their sums are in the state of its parameters, and how many there are is in its groups: checkpoints have both.
    """

    def __init__(self) -> None:
        #: The parameters that had one.
        self.waiting: set[Tensor] = set()

    def add(self, gradients: Mapping[Tensor, Tensor], groups: Groups, states: States) -> int:
        """Add the gradients of a step, or this rank's shards of them; return how many steps have been added up."""
        for operation, is_waiting in ((torch._foreach_copy_, False), (torch._foreach_add_, True)):
            own = [(p, g) for p, g in gradients.items() if (p in self.waiting) is is_waiting]
            if own:  # the first takes the place of a former sum
                operation([local(states[p][ACCUMULATED]) for p, _ in own], [g for _, g in own])
        self.waiting.update(gradients)
        count = count_accumulated(groups) + 1
        for group in groups:
            group[ACCUMULATED] = count
        return count

    def gradients(self, params: Sequence[Tensor], states: States) -> list[Any]:
        """The sum of each parameter, None without one."""
        return [states[p][ACCUMULATED] if p in self.waiting else None for p in params]

    def forget(self, groups: Groups) -> None:
        self.waiting.clear()
        for group in groups:
            if group.get(ACCUMULATED):
                group[ACCUMULATED] = 0

    def restore(self, groups: Groups, states: States) -> None:
        """Continue with groups and states that were saved."""
        self.waiting = {p for p, s in states.items() if ACCUMULATED in s} if count_accumulated(groups) else set()


def count_accumulated(groups: Groups) -> int:
    return max((int(group.get(ACCUMULATED, 0)) for group in groups), default=0)
