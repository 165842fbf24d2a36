"""Steps that are like the one before: the same parameters, state and options, with new gradients alone.

Sorting parameters into buckets takes the host longer than a GPU needs for a step. So what was found is kept, with all
that it depends on, and taken again as long as that is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from thalweg.torch.bucket import Bucket


class Recall:
    """The buckets of a step, and what they depend on."""

    def __init__(
        self, buckets: Sequence[Bucket], idle: Sequence[Tensor], states: Mapping[Tensor, Any], settings: Sequence[Any]
    ) -> None:
        self.buckets, self.idle, self.settings = buckets, idle, settings
        self.params = [p for bucket in buckets for p in bucket.params]
        self.kinds = kinds_of([g for bucket in buckets for g in bucket.grads])
        self.memory = memory_of(self.params, states)

    def again(
        self, states: Mapping[Tensor, Any], settings: Sequence[Any], rates: Sequence[float | Tensor | None]
    ) -> list[Bucket] | None:
        """The same buckets with the gradients and rates of today; None if anything else has changed."""
        grads: list[Any] = [p.grad for p in self.params]
        if (
            settings != self.settings
            or any(p.grad is not None for p in self.idle)
            or kinds_of(grads) != self.kinds
            or memory_of(self.params, states) != self.memory
        ):
            return None
        buckets, first = [], 0
        for bucket, lr in zip(self.buckets, rates, strict=True):
            own = grads[first : first + len(bucket.params)]
            first += len(own)
            t = None
            if bucket.t is not None:  # the host counts, and buckets are of one step
                steps = {s["step"].item() for s in bucket.states}
                if len(steps) > 1:
                    return None
                t = int(steps.pop()) + 1
            buckets.append(replace(bucket, grads=own, lr=lr, t=t))
        return buckets


def can_recall(buckets: Sequence[Bucket]) -> bool:
    return all(bucket.on_gpu and not bucket.parts for bucket in buckets)


def memory_of(params: Sequence[Tensor], states: Mapping[Tensor, Any]) -> list[Any]:
    """Where parameters and state are. Whole lists go through ``map``: this is asked at every step."""
    entries = list(chain.from_iterable(map(dict.values, states.values())))
    return [
        *map(Tensor.data_ptr, params),
        *map(Tensor.data_ptr, entries),
        *map(id, entries),
        *map(id, states.values()),
        *[p.dtype for p in params],
    ]


def kinds_of(grads: Sequence[Tensor | None]) -> list[Any]:
    """What may be new in a gradient: torch itself sees to it that shape and device are the parameter's."""
    return [*map(type, grads), *[None if g is None else (g.dtype, g.layout) for g in grads]]
