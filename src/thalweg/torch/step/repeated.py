"""A step that is like the one before: the same parameters, state and options, with new gradients alone.

Sorting parameters into buckets takes the host longer than a GPU needs for a step. So what was found is kept, with all
that it depends on, and taken again as long as that is unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import Tensor

from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.sharding.shards import is_distributed, local

DTYPE, LAYOUT = operator.attrgetter("dtype"), operator.attrgetter("layout")


class RepeatedStep:
    """The buckets of a step, and what they depend on."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        named: Mapping[str, Tensor],
        states: Mapping[Tensor, Any],
        settings: Sequence[Any],
    ) -> None:
        """named: all parameters of the optimizer."""
        # without gradients: they must not be kept alive after the step
        self.buckets = [replace(bucket, grads=()) for bucket in buckets]
        self.settings = settings
        self.params = [named[name] for bucket in buckets for name in bucket.names]
        self.idle = [p for p in named.values() if p.grad is None]
        self.are_dtensors = any(map(is_distributed, self.params))
        self.kinds = kinds_of([p.grad for p in self.params])
        self.holders, self.entries = held_by(states)
        self.memory = memory_of(self.local(self.params), self.local(self.entries))

    def local(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """This rank's shards of tensors, as they are now: FSDP2 may exchange the shard of a DTensor that stays."""
        return [getattr(x, "_local_tensor", x) for x in tensors] if self.are_dtensors else tensors

    def again(
        self,
        states: Mapping[Tensor, Any],
        settings: Sequence[Any],
        rates: Sequence[tuple[float | Tensor | None, float]],
    ) -> list[Bucket] | None:
        """The same buckets with the current gradients and rates; None if anything else has changed."""
        grads: list[Any] = [p.grad for p in self.params]
        holders, entries = held_by(states)
        if (
            settings != self.settings
            or any(p.grad is not None for p in self.idle)
            or kinds_of(grads) != self.kinds
            or not are_the_same(holders, self.holders)
            or not are_the_same(entries, self.entries)
            or memory_of(self.local(self.params), self.local(entries)) != self.memory
            or (self.are_dtensors and not are_placed_alike(self.params, grads))
        ):
            return None
        if self.are_dtensors:
            grads = local_gradients(self.local(grads), grads)
        buckets, first = [], 0
        for bucket, (lr, factor) in zip(self.buckets, rates, strict=True):
            own = grads[first : first + len(bucket.params)]
            first += len(own)
            t = None
            if bucket.t is not None:  # the host counts, and buckets are of one step
                steps = {s["step"].item() for s in bucket.states}
                if len(steps) > 1:
                    return None
                t = int(steps.pop()) + 1
            buckets.append(replace(bucket, grads=own, lr=lr, lr_scale=bucket.setting.lr_scale * factor, t=t))
        return buckets


def is_repeatable(buckets: Sequence[Bucket]) -> bool:
    return all(bucket.on_gpu for bucket in buckets)


def are_placed_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether gradients can be used as they are: on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(*([getattr(x, "_spec", None) for x in some] for some in (params, grads))) or all(
        p.placements == g.placements and p.device_mesh is g.device_mesh  # type: ignore[attr-defined]
        for p, g in zip(params, grads, strict=True)
        if is_distributed(p)
    )


def local_gradients(held: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Shards of gradients; those that are still on their way from other ranks are waited for."""
    return [x if type(x) is Tensor else local(g) for x, g in zip(held, grads, strict=True)]


# Whole lists go through ``map``: these are asked at every step.


def held_by(states: Mapping[Tensor, Any]) -> tuple[list[Any], list[Tensor]]:
    """The states of parameters, and all entries of them."""
    holders = list(states.values())
    return holders, list(chain.from_iterable(map(dict.values, holders)))


def are_the_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether none of them was replaced."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def memory_of(params: Sequence[Tensor], entries: Sequence[Tensor]) -> list[Any]:
    """Where parameters and state are."""
    return [*map(Tensor.data_ptr, params), *map(Tensor.data_ptr, entries), *map(DTYPE, params)]


def kinds_of(grads: Sequence[Tensor | None]) -> list[Any]:
    """What may be new in a gradient: torch itself sees to it that shape and device are the parameter's."""
    types = list(map(type, grads))
    return types if type(None) in types else [*types, *map(DTYPE, grads), *map(LAYOUT, grads)]
