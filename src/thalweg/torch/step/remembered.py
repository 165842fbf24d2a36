"""A step that is remembered: laid out once, and taken again as long as nothing has changed but gradients and numbers.

Sorting parameters, checking them and laying out tables takes longer than the arithmetic of a small model. All of it
belongs to one object, which says itself when it no longer holds: :meth:`RememberedStep.recall`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from thalweg.kernels.cpu.library import reason_missing
from thalweg.kernels.cpu.tables import Counts
from thalweg.settings import Settings
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.sharding.shards import is_distributed
from thalweg.torch.step.look import local_part, look_at
from thalweg.torch.step.runs import Runs

GRAD = operator.attrgetter("grad")
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
        grads: list[Any],
    ) -> None:
        """places: the name and the group of every parameter, grads: its gradient. settings: of every group."""
        # without gradients: they must not be kept alive after the step
        self.buckets = [replace(bucket, grads=()) for bucket in buckets]
        self.runs, self.settings = runs, settings
        named = {name: p for p, (name, _) in places.items()}
        self.params = [named[name] for bucket in buckets for name in bucket.names]
        #: The places of those parameters among all that were given.
        at = {p: i for i, p in enumerate(places)}
        self.order = [at[p] for p in self.params]
        self.are_dtensors = any(map(is_distributed, self.params))
        self.look = look_at(self.params, grads, self.order, states)
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
        grads: list[Any],
        states: Mapping[Tensor, Any],
        settings: Sequence[Settings],
        rates: Sequence[tuple[Any, float]],
    ) -> list[Bucket] | None:
        """The buckets of this step with the gradients, rates and numbers of now; None if the step no longer holds.

        grads: of all parameters that were given, None for those without.

        It holds as long as

        - the same parameters have gradients, of the same types, devices, dtypes, shapes and strides (that they have
          moved is for the run to follow), placed like their parameters where they are DTensors;
        - the options of their groups are the same but for numbers that are not 0, and none has gained or lost its lr;
        - parameters lie where they did, with the same dtypes, shapes and strides;
        - state is kept in the same dictionaries, in the same tensors, at the same addresses;
        - the parameters of a bucket have been stepped equally often.

        That groups hold the same parameters under the same names is seen before; on what loads, clears or moves state,
        the optimizer forgets its steps. The device, the engine and what hooks do follow from these.
        """
        addresses = self.look.find_gradients(grads, states)
        if addresses is None or not self.follow(settings):
            return None
        grads = [grads[i] for i in self.order]
        if self.are_dtensors:
            grads = list(map(local_part, grads))
        negated = any(map(Tensor.is_neg, grads))  # what lies in memory is not what they are
        buckets, first = [], 0
        for bucket, counts, (lr, factor) in zip(self.buckets, self.counts, rates, strict=True):
            own = slice(first, first + len(bucket.params))
            first = own.stop
            t = bucket.t
            if t is not None:  # the host counts
                count = counts.read() if isinstance(counts, Counts) else equal_counts(counts)
                if count is None:
                    return None
                t = int(count) + 1
            if (lr is None) != (bucket.lr is None):
                return None
            place, scale = None if negated else addresses[own], bucket.setting.lr_scale * factor
            buckets.append(bucket.renewed(grads=grads[own], addresses=place, lr=lr, lr_scale=scale, t=t))
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


def counts_of(bucket: Bucket) -> Counts | list[Tensor]:
    """The counts of steps of a bucket's parameters, where native code can read them, or else as they are."""
    steps = [s["step"] for s in bucket.states]
    if reason_missing() is None and all(step.is_cpu and step.dtype == torch.float32 for step in steps):
        return Counts(map(Tensor.data_ptr, steps))
    return steps


def equal_counts(steps: Sequence[Tensor]) -> float | None:
    counts = {step.item() for step in steps}
    return counts.pop() if len(counts) == 1 else None
