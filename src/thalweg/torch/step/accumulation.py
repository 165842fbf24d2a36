"""Gradients of several steps added up in float32, or in float64 for such parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from thalweg.settings import Settings
from thalweg.storage import ACCUMULATED
from thalweg.torch.engines.adding import Sums, sums_by_kernels
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.sharding.shards import local
from thalweg.torch.step.look import Given, look_at

States = Mapping[Tensor, Mapping[str, Tensor]]
Groups = Sequence[dict[str, Any]]


class Accumulation:
    """The gradients of an optimizer that wait for a step.

    Their sums are in the state of its parameters, and how many there are is in its groups: checkpoints have both.
    """

    def __init__(self) -> None:
        #: The parameters that had one.
        self.waiting: frozenset[Tensor] = frozenset()
        #: The parameters whose gradients the last call has added, and how, if the next may do the same.
        self.params: frozenset[Tensor] = frozenset()
        self.latest: Addition | None = None

    def add(
        self, gradients: Mapping[Tensor, Tensor], given: Given, states: States, settings: Sequence[Settings]
    ) -> None:
        """Add the gradients of a step, or this rank's shards of them. given: all parameters, as groups have them."""
        for operation, is_waiting in ((torch._foreach_copy_, False), (torch._foreach_add_, True)):
            own = [(p, g) for p, g in gradients.items() if (p in self.waiting) is is_waiting]
            if own:  # the first takes the place of a former sum
                operation([local(states[p][ACCUMULATED]) for p, _ in own], [g for _, g in own])
        params, before, self.latest = frozenset(gradients), self.params, None
        self.params, self.waiting = params, self.waiting | params
        if params and params == before:  # and may be the same once more
            self.latest = Addition(gradients, given, states, settings)
            self.waiting = self.latest.params if self.waiting == params else self.waiting

    def add_again(self, given: Given, states: States, settings: Sequence[Settings]) -> bool:
        """Add gradients as the last call has; whether nothing but these has changed since."""
        latest = self.latest
        if latest is None or not are_the_same(settings, latest.settings):
            return False
        if self.waiting and self.waiting is not latest.params:
            return False
        if not latest.add(given, states, is_first=not self.waiting):
            return False
        self.waiting = latest.params
        return True

    def count(self, groups: Groups) -> int:
        """Count a step that was added; return how many there are."""
        count = count_accumulated(groups) + 1
        for group in groups:
            group[ACCUMULATED] = count
        return count

    def gradients(self, params: Sequence[Tensor], states: States) -> list[Any]:
        """The sum of each parameter, None without one."""
        return [states[p][ACCUMULATED] if p in self.waiting else None for p in params]

    def forget(self, groups: Groups) -> None:
        self.waiting = frozenset()
        for group in groups:
            if group.get(ACCUMULATED):
                group[ACCUMULATED] = 0

    def restore(self, groups: Groups, states: States) -> None:
        """Continue with groups and states that were saved."""
        waiting = [p for p, s in states.items() if ACCUMULATED in s] if count_accumulated(groups) else ()
        self.waiting = frozenset(waiting)


class Addition:
    """Gradients that were added to sums: others of the same parameters, stored alike, are added by one call."""

    def __init__(
        self, gradients: Mapping[Tensor, Tensor], given: Given, states: States, settings: Sequence[Settings]
    ) -> None:
        self.params, self.settings = frozenset(gradients), settings
        every = list(chain.from_iterable(given))
        self.order = [i for i, p in enumerate(every) if p in gradients]
        self.look = look_at(given, self.order, states)
        self.sums = [local(states[every[i]][ACCUMULATED]) for i in self.order]
        #: What adds on a GPU, once that has been asked for.
        self.kernels: Sums | None = None
        self.is_asked = False

    def add(self, given: Given, states: States, *, is_first: bool) -> bool:
        found = self.look.find_gradients(given, states)
        if found is None:
            return False
        every_grad, addresses, negated = found
        grads = [every_grad[i] for i in self.order]
        if not self.is_asked and not is_first:
            self.kernels, self.is_asked = sums_by_kernels(self.sums, grads), True
        if is_first:
            torch._foreach_copy_(self.sums, grads)
        elif self.kernels is None or negated:
            torch._foreach_add_(self.sums, grads)
        else:
            self.kernels.add(grads, addresses)
        return True


def count_accumulated(groups: Groups) -> int:
    return max((int(group.get(ACCUMULATED, 0)) for group in groups), default=0)
