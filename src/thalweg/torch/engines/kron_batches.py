"""All batches of Kron in a run: what their steps have in common is found once for a step, and not for each batch."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor

from thalweg.rules.entries import Count
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.replay import NUMBERS, Moving
from thalweg.torch.engines.triton_whole import UNKNOWN, KronLaunch


class KronBatches:
    """Batches that are stepped together, as long as all of them are at the same step and have the same factors due."""

    def __init__(self, launches: Sequence[KronLaunch], buckets: Sequence[Bucket], moving: Moving) -> None:
        self.launches, self.moving = launches, moving
        self.batches = [launch.batch for launch in launches]
        first, last = self.batches[0], self.batches[-1]
        #: Where all their addresses of gradients are, and all their numbers.
        self.places = slice(moving.places[id(first)].start, moving.places[id(last)].stop)
        self.numbers = slice(moving.numbered[id(first)], moving.numbered[id(last)] + NUMBERS)
        states = [s for bucket in buckets for s in bucket.states]
        keys = *buckets[0].setting.rule.keys(buckets[0].shape, Count), "step"
        self.refreshes, self.steps = (HostCounts([s[key] for s in states]) for key in keys)
        #: Whether it is possible at all: the device may count.
        self.works = (
            self.refreshes.native is not None
            and self.steps.native is not None
            and all(bucket.t is not None for bucket in buckets)
        )
        self.after = 0.0
        self.forget()

    def forget(self) -> None:
        #: What scales gradients, and the settings of buckets; by whether factors are due, what is launched for each.
        self.given: list[Any] = []
        self.known: dict[bool, list[Any]] = {}
        self.together = False
        #: Of each batch: the place of its kind among those that have the same numbers; a bucket of each with formulas.
        self.kinds: list[int] = []
        self.examples: list[tuple[int, Any]] = []
        self.keys: tuple[Hashable, tuple[Hashable, ...]] = None, ()

    def note(self, buckets: Sequence[Bucket]) -> None:
        """Remember what each batch has found out for itself, if the next steps can be like this one."""
        from thalweg.kernels.triton.kron import formulas_of

        self.together = False
        due = {flag for batch in self.batches for flag in batch.due}
        if not self.works or len(due) != 1 or not has_plain_numbers(buckets):
            return
        if not all(batch.grads_aligned for batch in self.batches):
            return
        given = [buckets[0].grad_scale, *(bucket.setting for bucket in buckets)]
        if not are_the_same(given, self.given):
            self.forget()
            self.given = given
            kinds: dict[Hashable, int] = {}
            for place, (bucket, batch) in enumerate(zip(buckets, self.batches, strict=True)):
                formulas: Any = formulas_of(batch, bucket.setting.stored_rule)  # type: ignore[arg-type]
                kind = id(bucket.setting), bucket.group, id(formulas)
                if kind not in kinds:
                    kinds[kind] = len(kinds)
                    self.examples.append((place, formulas))
                self.kinds.append(kinds[kind])
        self.known[due.pop()] = [launch.prepared for launch in self.launches]

    def prepare(self, buckets: Sequence[Bucket]) -> bool:
        """Take the gradients and numbers of a step; False if each batch has to look for itself, and nothing is done."""
        from thalweg.kernels.triton.kron_formulas import Options, counted_on, numbers_of
        from thalweg.kernels.triton.tables import are_aligned

        self.together = False
        t = buckets[0].t
        if not self.known or not has_plain_numbers(buckets) or any(bucket.t != t for bucket in buckets):
            return False
        if not are_the_same([buckets[0].grad_scale, *(bucket.setting for bucket in buckets)], self.given):
            return False
        addresses = array("Q", b"".join([bucket.addresses for bucket in buckets]))  # type: ignore[misc]
        before = self.refreshes.read()
        if before is None or not are_aligned(addresses):
            return False
        assert t is not None
        found, packed, rates = set[tuple[bool, float]](), [], []
        for place, formulas in self.examples:
            bucket = buckets[place]
            options, lr = Options.of(bucket.setting.stored_rule), float(bucket.lr)  # type: ignore[arg-type]
            found.add(counted_on(formulas, options, t, before))
            packed.append(self.moving.pack(numbers_of(formulas, options, t, lr, bucket.lr_scale)))
            rates.append(bucket.rate)
        due, self.after = found.pop()
        if found or due not in self.known:
            return False
        self.moving.put(self.places, addresses)
        self.moving.put(self.numbers, array("Q", b"".join([packed[kind] for kind in self.kinds])))
        for launch, batch, prepared, kind in zip(self.launches, self.batches, self.known[due], self.kinds, strict=True):
            launch.prepared, launch.rate = prepared, rates[kind]
            batch.grad_places = UNKNOWN  # they are where another step of this batch does not look
            wanted = [due] * len(batch.due)
            if batch.due != wanted:
                batch.follow_due(wanted)
        self.together = True
        return True

    def key(self) -> tuple[Hashable, ...]:
        """What the launches of all batches depend on beside tables."""
        known = id(self.launches[0].prepared), self.batches[0].scratch_place
        if not self.together or known != self.keys[0]:
            self.keys = known, tuple([launch.key() for launch in self.launches])
        return self.keys[1]

    def count_step(self) -> None:
        """The step is taken."""
        if not self.together:
            for launch in self.launches:
                launch.count_step()
            return
        self.steps.advance()
        self.refreshes.write(self.after)


def has_plain_numbers(buckets: Sequence[Bucket]) -> bool:
    """Whether the host knows all that a step begins with, and where its gradients are."""
    return not [
        bucket
        for bucket in buckets
        if bucket.addresses is None or isinstance(bucket.lr, Tensor) or bucket.allowed is not None
    ]
