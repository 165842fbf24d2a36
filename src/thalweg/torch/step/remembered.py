"""A step that is remembered: laid out once, and taken again as long as nothing has changed but gradients and numbers.

Sorting parameters, checking them and laying out tables takes longer than the arithmetic of a small model. All of it
belongs to one object, which says itself when it no longer holds: :meth:`RememberedStep.recall`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.tables import Counts
from thalweg.settings import Settings
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.sharding.shards import is_distributed, local
from thalweg.torch.step.runs import Runs

DTYPE, GRAD, LAYOUT, SHAPE = map(operator.attrgetter, ("dtype", "grad", "layout", "shape"))
#: Steps of different parameters that are remembered at once: experts and adversaries take turns.
MOST_REMEMBERED = 8


def presence_of(grads: Sequence[Tensor | None]) -> bytes:
    """Which parameters have a gradient, a byte for each."""
    return bytes(map(operator.is_not, grads, repeat(None)))


class RememberedStep:
    """A step of some parameters, with all that was found out for it."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        runs: Runs,
        places: Mapping[Tensor, tuple[str, int]],
        states: Mapping[Tensor, Any],
        settings: Sequence[Settings],
    ) -> None:
        """places: the name and the group of every parameter. settings: of every group."""
        # without gradients: they must not be kept alive after the step
        self.buckets = [replace(bucket, grads=()) for bucket in buckets]
        self.runs, self.settings = runs, settings
        named = {name: p for p, (name, _) in places.items()}
        self.params = [named[name] for bucket in buckets for name in bucket.names]
        self.are_dtensors = any(map(is_distributed, self.params))
        grads = [g for bucket in buckets for g in bucket.grads]
        self.types, self.grads = list(map(type, map(GRAD, self.params))), forms_of(grads)
        self.holders, self.entries = held_by(states)
        self.memory = self.memory_of(self.entries)
        self.counts = [counts_of(bucket) for bucket in buckets]
        #: Of each bucket: a parameter for each way in which options can reach one of its parameters.
        self.examples: list[list[tuple[str, Tensor]]] = []
        for bucket in buckets:
            found: dict[Any, tuple[str, Tensor]] = {}
            for name in bucket.names:
                _, matched = settings[bucket.group].of(name, named[name])
                found.setdefault((named[name].ndim, *matched), (name, named[name]))
            self.examples.append(list(found.values()))

    def recall(
        self,
        states: Mapping[Tensor, Any],
        settings: Sequence[Settings],
        rates: Sequence[tuple[Any, float]],
    ) -> list[Bucket] | None:
        """The buckets of this step with the gradients, rates and numbers of now; None if the step no longer holds.

        It holds as long as

        - the same parameters have gradients, of the same types, dtypes, shapes and layouts (that they have moved, or
          have other strides, is for the run to follow), placed like their parameters where they are DTensors;
        - the options of their groups are the same but for numbers that are not 0, and none has gained or lost its lr;
        - parameters lie where they did, with the same dtypes, shapes and strides;
        - state is kept in the same dictionaries, in the same tensors, at the same addresses;
        - the parameters of a bucket have been stepped equally often.

        That groups hold the same parameters under the same names is seen before; on what loads, clears or moves state,
        the optimizer forgets its steps. The device, the engine and what hooks do follow from these.
        """
        grads: list[Any] = list(map(GRAD, self.params))
        if list(map(type, grads)) != self.types:
            return None
        held = grads
        if self.are_dtensors:
            if not are_placed_alike(self.params, grads):
                return None
            held = local_gradients(grads)
        holders, entries = held_by(states)
        if (
            forms_of(held) != self.grads
            or not are_the_same(holders, self.holders)
            or not are_the_same(entries, self.entries)
            or self.memory_of(entries) != self.memory
            or not self.follow(settings)
        ):
            return None
        buckets, first = [], 0
        for bucket, counts, (lr, factor) in zip(self.buckets, self.counts, rates, strict=True):
            own = held[first : first + len(bucket.params)]
            first += len(own)
            t = bucket.t
            if t is not None:  # the host counts
                count = counts.read() if isinstance(counts, Counts) else equal_counts(counts)
                if count is None:
                    return None
                t = int(count) + 1
            if (lr is None) != (bucket.lr is None):
                return None
            buckets.append(bucket.renewed(grads=own, lr=lr, lr_scale=bucket.setting.lr_scale * factor, t=t))
        return buckets

    def follow(self, settings: Sequence[Settings]) -> bool:
        """Take over options that differ in numbers alone; False if they differ in more."""
        if all(map(operator.is_, settings, self.settings)):
            return True
        followed = []
        for bucket, examples in zip(self.buckets, self.examples, strict=True):
            setting, *others = [settings[bucket.group].of(*example)[0] for example in examples]
            if setting.kind != bucket.setting.kind or any(other is not setting for other in others):
                return False
            followed.append(replace(bucket, setting=setting))
        self.buckets, self.settings = followed, settings
        return True

    def memory_of(self, entries: Sequence[Tensor]) -> list[Any]:
        """Where parameters and their state are, and how parameters are stored."""
        params = self.params
        if self.are_dtensors:  # FSDP2 may exchange the shard of a DTensor that stays
            params, entries = ([getattr(x, "_local_tensor", x) for x in some] for some in (params, entries))
        addresses = *map(Tensor.data_ptr, params), *map(Tensor.data_ptr, entries)
        return [*addresses, *map(DTYPE, params), *map(SHAPE, params), *map(Tensor.stride, params)]


def are_placed_alike(params: Sequence[Tensor], grads: Sequence[Tensor]) -> bool:
    """Whether gradients can be used as they are: on the meshes of their parameters, with their placements."""
    # FSDP2 gives a gradient the very specification of its parameter
    return are_the_same(*([getattr(x, "_spec", None) for x in some] for some in (params, grads))) or all(
        p.placements == g.placements and p.device_mesh is g.device_mesh  # type: ignore[attr-defined]
        for p, g in zip(params, grads, strict=True)
        if is_distributed(p)
    )


def local_gradients(grads: Sequence[Tensor]) -> list[Tensor]:
    """Shards of gradients; those that are still on their way from other ranks are waited for."""
    held = [getattr(g, "_local_tensor", g) for g in grads]
    return [x if type(x) is Tensor else local(g) for x, g in zip(held, grads, strict=True)]


# Whole lists go through ``map``: these are asked at every step.


def forms_of(grads: Sequence[Tensor]) -> list[Any]:
    """All that is checked of gradients but where they are."""
    return [*map(DTYPE, grads), *map(SHAPE, grads), *map(LAYOUT, grads)]


def held_by(states: Mapping[Tensor, Any]) -> tuple[list[Any], list[Tensor]]:
    """The states of parameters, and all entries of them."""
    holders = list(states.values())
    return holders, list(chain.from_iterable(map(dict.values, holders)))


def are_the_same(objects: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether none of them was replaced."""
    return len(objects) == len(others) and all(map(operator.is_, objects, others))


def counts_of(bucket: Bucket) -> Counts | list[Tensor]:
    """The counts of steps of a bucket's parameters, where native code can read them, or else as they are."""
    steps = [s["step"] for s in bucket.states]
    if reason_missing() is None and all(step.is_cpu and step.dtype == torch.float32 for step in steps):
        return Counts(map(Tensor.data_ptr, steps))
    return steps


def equal_counts(steps: Sequence[Tensor]) -> float | None:
    counts = {step.item() for step in steps}
    return counts.pop() if len(counts) == 1 else None
