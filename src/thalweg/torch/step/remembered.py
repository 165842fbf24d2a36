"""A step that is remembered: laid out once, and taken again as long as nothing has changed but gradients and numbers.

Sorting parameters, checking them and laying out tables takes longer than the arithmetic of a small model. All of it
belongs to one object, which says itself when it no longer holds: :meth:`RememberedStep.recall`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

from torch import Tensor

from thalweg.kernels.cpu.tables import Counts
from thalweg.settings import RuleOptions
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.step.buckets import OfGroups
from thalweg.torch.step.look import Given, Look
from thalweg.torch.step.runs import Runs

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
        given: Given,
        places: Mapping[Tensor, tuple[str, int]],
        states: Mapping[Tensor, Any],
        settings: OfGroups[RuleOptions],
    ) -> None:
        """given: parameters, in lists as groups have them. places: the name and group of those to be stepped.

        settings: of their groups, by index.
        """
        # without gradients: they must not be kept alive after the step
        self.buckets = [replace(bucket, grads=()) for bucket in buckets]
        self.runs, self.settings = runs, settings
        named = {name: p for p, (name, _) in places.items()}
        params = [named[name] for bucket in buckets for name in bucket.names]
        #: The places of those parameters among all that were given.
        at = {p: i for i, p in enumerate(chain.from_iterable(given))}
        order = [at[p] for p in params]
        self.look = Look(given, order, states)
        self.counts = [HostCounts([s["step"] for s in bucket.states]) for bucket in buckets]
        #: All that native code can read, at once: most are equal.
        readable = [counts.native.addresses for counts in self.counts if counts.native is not None]
        self.readable = Counts(chain.from_iterable(readable)) if readable else None
        #: Of each bucket: a parameter for each way in which options can reach one of its parameters.
        self.examples: list[list[tuple[str, Tensor]]] = []
        for bucket in buckets:
            found: dict[Any, tuple[str, Tensor]] = {}
            for name in bucket.names:
                _, matched = settings[bucket.group].of(name, named[name])
                found.setdefault((named[name].shape, *matched), (name, named[name]))
            self.examples.append(list(found.values()))

    def recall(
        self,
        given: Given,
        states: Mapping[Tensor, Any],
        options: Callable[[], tuple[OfGroups[RuleOptions], OfGroups[tuple[Any, float]]]],
    ) -> list[Bucket] | None:
        """The buckets of this step with the gradients, rates and numbers of now; None if the step no longer holds.

        options: tells the settings and the rates of groups, by index, once these are known to have the same parameters.

        It holds as long as

        - groups have the same parameters, in the same order (their names are compared before);
        - the same parameters have gradients, of the same types, devices, dtypes, shapes and strides (that they have
          moved is for the run to follow), placed like their parameters where they are DTensors;
        - the options of their groups are the same but for numbers that are not 0, and none has gained or lost its lr;
        - parameters lie where they did, with the same dtypes, shapes and strides;
        - state is kept in the same dictionaries, in the same tensors, at the same addresses;
        - the parameters of a bucket have been stepped equally often.

        On what loads, clears or moves state, the optimizer forgets its steps. The device, the engine and what hooks do
        follow from these.
        """
        found = self.look.find_gradients(given, states)
        if found is None:
            return None
        grads, addresses, negated = found  # if it is negated, what lies there is not what it is
        settings, rates = options()
        if settings is not self.settings and not self.follow(settings):
            return None
        all_equal = None if self.readable is None else self.readable.read()
        buckets, first = [], 0
        for bucket, counts in zip(self.buckets, self.counts, strict=True):
            lr, factor = rates[bucket.group]
            own = slice(first, first + len(bucket.params))
            first = own.stop
            t = bucket.t
            if t is not None:  # the host counts
                count = counts.read() if all_equal is None or counts.native is None else all_equal
                if count is None:
                    return None
                t = int(count) + 1
            if (lr is None) != (bucket.lr is None):
                return None
            place, scale = None if negated else addresses[own], bucket.setting.lr_scale * factor
            buckets.append(bucket.renewed(grads=grads[own], addresses=place, lr=lr, lr_scale=scale, t=t))
        return buckets

    def follow(self, settings: OfGroups[RuleOptions]) -> bool:
        """Take over options that differ in numbers alone; False if they differ in more."""
        if all(settings[bucket.group] is self.settings[bucket.group] for bucket in self.buckets):
            self.settings = settings
            return True
        followed = []
        for bucket, examples in zip(self.buckets, self.examples, strict=True):
            setting, *others = [settings[bucket.group].of(*example)[0] for example in examples]
            if setting.kind != bucket.setting.kind or any(other is not setting for other in others):
                return False
            followed.append(replace(bucket, setting=setting))
        self.buckets, self.settings = followed, settings
        return True
