"""Steps that are like the one before: the same parameters, state and options, with new gradients alone.

Sorting parameters into buckets takes the host longer than a GPU needs for a step. So what was found is kept, with all
that it depends on, and taken again as long as that is unchanged. Steps whose number the host counts are not kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from thalweg.torch.bucket import Bucket


class Recall:
    """The buckets of a step, and what they depend on."""

    def __init__(
        self, buckets: Sequence[Bucket], idle: Sequence[Tensor], states: Mapping[Tensor, Any], settings: Sequence[Any]
    ) -> None:
        self.buckets, self.idle, self.settings = buckets, idle, settings
        self.states = [[states[p] for p in bucket.params] for bucket in buckets]
        self.memory = [[memory_of(*pair) for pair in zip(b.params, s, strict=True)] for b, s in self.pairs()]
        self.kinds = [[kind_of(g) for g in bucket.grads] for bucket in buckets]

    def pairs(self) -> Any:
        return zip(self.buckets, self.states, strict=True)

    def again(
        self, states: Mapping[Tensor, Any], settings: Sequence[Any], rates: Sequence[float | Tensor | None]
    ) -> list[Bucket] | None:
        """The same buckets with the gradients and rates of today; None if anything else has changed."""
        if settings != self.settings or any(p.grad is not None for p in self.idle):
            return None
        buckets = []
        for (bucket, known), memory, kinds, lr in zip(self.pairs(), self.memory, self.kinds, rates, strict=True):
            grads: list[Any] = [p.grad for p in bucket.params]
            if [None if g is None else kind_of(g) for g in grads] != kinds:
                return None
            for p, state, place in zip(bucket.params, known, memory, strict=True):
                if states[p] is not state or memory_of(p, state) != place:
                    return None
            buckets.append(replace(bucket, grads=grads, lr=lr, grad_scale=None, allowed=None))
        return buckets


def can_recall(buckets: Sequence[Bucket]) -> bool:
    return all(bucket.t is None and bucket.on_gpu and not bucket.parts for bucket in buckets)


def memory_of(p: Tensor, state: Mapping[str, Tensor]) -> list[Any]:
    """Where a parameter and its state are; two tensors are never at one place at the same time."""
    return [p.data_ptr(), p.dtype, *[entry.data_ptr() for entry in state.values()], *map(id, state.values())]


def kind_of(g: Tensor) -> tuple[Any, ...]:
    return type(g), g.dtype, g.shape, g.device, g.layout
