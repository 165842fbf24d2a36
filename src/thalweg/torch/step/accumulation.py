"""Gradients of several steps added up in float32, or in float64 for such parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thalweg.storage import ACCUMULATED
from thalweg.torch.sharding.shards import local


class Accumulation:
    """The gradients of an optimizer that are waiting for a step. Their sums are in the state of its parameters."""

    def __init__(self) -> None:
        #: How many steps have been added up, and the parameters that had a gradient in one of them.
        self.count = 0
        self.waiting: set[Tensor] = set()

    def add(self, gradients: Mapping[Tensor, Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Add the gradients of a step, or this rank's shards of them. The first takes the place of a former sum."""
        for operation, is_waiting in ((torch._foreach_copy_, False), (torch._foreach_add_, True)):
            own = [(p, g) for p, g in gradients.items() if (p in self.waiting) is is_waiting]
            if own:
                operation([local(states[p][ACCUMULATED]) for p, _ in own], [g for _, g in own])
        self.waiting.update(gradients)
        self.count += 1

    def gradients(self, params: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]) -> list[Any]:
        """The sum of each parameter, None without one."""
        return [states[p][ACCUMULATED] if p in self.waiting else None for p in params]

    def forget(self) -> None:
        self.count = 0
        self.waiting.clear()

    def restore(self, count: int, states: Mapping[Tensor, Mapping[str, Tensor]]) -> None:
        """Continue after so many steps that were saved."""
        self.count = count
        self.waiting = {p for p, state in states.items() if ACCUMULATED in state} if count else set()
