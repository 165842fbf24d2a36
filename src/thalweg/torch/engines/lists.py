"""The engine whose arithmetic is torch's own: it answers with new values, and then copies them into place."""

from __future__ import annotations

import functools
import itertools
import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain

import torch

from thalweg.dtypes import DTYPES
from thalweg.kernels.chunks import CHUNK
from thalweg.rules.whole import SLOT, WholeRule
from thalweg.storage import arithmetic
from thalweg.torch.engines.protocol import Bucket, Foreseen, Statistics, count_largest
from thalweg.torch.engines.results import Result, results_of
from thalweg.torch.engines.shards import outline_of, result_of_shards
from thalweg.torch.sharding.collectives import Computation
from thalweg.torch.sharding.owners import Messages, Owners, Team, in_turn
from thalweg.torch.stacks import most_of_stack

#: Numbers of the arithmetic's precision that are alive for each element at most, beside new values; those where
#: rounding at random makes bits; those that a rule's ``transform`` does not count. Bytes that a tensor needs.
NUMBERS, NUMBERS_OF_RANDOM, NUMBERS_BESIDE_WHOLE, BYTES_OF_TENSOR = 16, 20, 4, 2**14


class Lists:
    """The lists of one optimizer. Whole tensors that this rank owns are kept from step to step."""

    def __init__(self, most: int | None = None, slot: int = SLOT) -> None:
        """most: elements of a stack of whole tensors. slot: how many elements travel to owners at a time."""
        self.owners, self.most = Owners(slot), most

    def lay_out(self, buckets: Sequence[Bucket]) -> ListsRun:
        return ListsRun(self.owners, self.most)

    def count_temporaries(self, params: Sequence[Foreseen]) -> int:
        """A chunk while it is computed, with its new values and those of the chunk before."""
        by_limit: dict[int, list[tuple[Foreseen, int]]] = defaultdict(list)
        waiting = 0
        for p in params:
            rule, numbers = p.setting.rule_at(1), NUMBERS_OF_RANDOM if p.setting.handling.is_random else NUMBERS
            limit = CHUNK
            if isinstance(rule, WholeRule):
                numbers = max(numbers, NUMBERS_BESIDE_WHOLE + rule.count_temporaries())
                limit = self.most or most_of_stack(rule, p.device)
            computed = numbers * p.extent * DTYPES[arithmetic(p.dtype)].bytes
            by_limit[limit].append((p, computed + 2 * p.value_bytes + BYTES_OF_TENSOR))
            # nothing is written before all is known to be finite
            waiting += p.value_bytes if p.setting.handling.on_nonfinite == "raise" else 0
        return max((count_largest(needed, limit) for limit, needed in by_limit.items()), default=0) + waiting

    def forget(self) -> None:
        self.owners.forget()


class ListsRun:
    """One step of buckets as lists: nothing is laid out."""

    measures_gradients, recorded = False, 0

    def __init__(self, owners: Owners, most: int | None) -> None:
        self.owners, self.most = owners, most
        self.buckets: Sequence[Bucket] = ()
        self.replicated: Sequence[Bucket] = ()
        self.results: list[Result] = []

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self.buckets, self.replicated, self.results = buckets, (), []

    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All new values if nothing may be written before they are known; else those of shards alone."""
        sharded = [bucket for bucket in self.buckets if bucket.parts]
        self.buckets = [bucket for bucket in self.buckets if not bucket.parts]
        if on_nonfinite != "raise":
            self.replicated = [bucket for bucket in sharded if not any(bucket.parts[0].groups)]
            sharded = [bucket for bucket in sharded if any(bucket.parts[0].groups)]
        else:
            self.results = [result for bucket in self.buckets for result in results_of(bucket, self.most)]
            self.buckets = ()
        return [self.measure_bucket(bucket) for bucket in sharded]

    def measure_bucket(self, bucket: Bucket) -> Computation:
        self.results.append((yield from result_of_shards(bucket, self.owners)))

    def nonfinite(self) -> list[str]:
        guilty = []
        for result in self.results:
            assert result.finite is not None
            flags = torch.stack([finite.reshape(()) for finite in result.finite]).tolist()
            guilty += [name for name, finite in zip(result.bucket.names, flags, strict=True) if not finite]
        return guilty

    def write(self) -> Statistics:
        statistics: Statistics = {}
        measured, self.results = self.results, []
        for result in chain(measured, chain.from_iterable(results_of(bucket, self.most) for bucket in self.buckets)):
            statistics.update(committed(result))
        if self.replicated:
            self.step_replicas(statistics)
        return statistics

    def step_replicas(self, statistics: Statistics) -> None:
        """Step whole tensors on which replicas divide the work, slot by slot: new values of few exist at once."""
        slots = self.owners.divide([outline_of(bucket) for bucket in self.replicated])
        for _, team_slots in itertools.groupby(slots, operator.itemgetter(0)):
            for send in in_turn([self.step_slot(*slot, statistics) for slot in team_slots]):
                send()

    def step_slot(self, team: Team, slot: Mapping[int, Sequence[int]], statistics: Statistics) -> Messages:
        chosen = [self.replicated[at].chosen(members) for at, members in slot.items()]
        steps = [result_of_shards(bucket, self.owners) for bucket in chosen]
        answers = yield from team.make_in_turn([request for step in steps for request in next(step).asked])
        for step, answer in zip(steps, answers, strict=True):
            try:
                step.send([answer])
            except StopIteration as end:
                statistics.update(committed(end.value))

    def release(self, *, taken: bool) -> None:
        self.buckets, self.replicated, self.results = (), (), []
        if not taken:
            self.owners.forget()


def committed(result: Result) -> Statistics:
    """Write new values, in place, and keep what there is to look at."""
    bucket = result.bucket
    torch._foreach_copy_(list(bucket.params), list(result.params))
    for key in result.states[0]:
        torch._foreach_copy_([s[key] for s in bucket.states], [new[key] for new in result.states])
    steps = [s["step"] for s in bucket.states]
    if result.finite is None:
        torch._foreach_add_(steps, 1)
    else:
        torch._foreach_add_(steps, [finite.to(steps[0].device, torch.float32) for finite in result.finite])
    rate = bucket.rate
    return {
        name: functools.partial(dict, rate, **{key: v[i] for key, v in result.stats.items()})
        for i, name in enumerate(bucket.names)
    }
