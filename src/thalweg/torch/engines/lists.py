"""The engine whose arithmetic is torch's own: it answers with new values, and then copies them into place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import torch

from thalweg.dtypes import DTYPES
from thalweg.kernels.chunks import CHUNK
from thalweg.rules import Direction
from thalweg.rules.whole import SLOT, WholeRule
from thalweg.storage import arithmetic
from thalweg.torch.engines.protocol import Bucket, say_buckets
from thalweg.torch.engines.results import Result, results_of
from thalweg.torch.engines.shards import outline_of, result_of_shards
from thalweg.torch.params.parameter import Param, count_largest
from thalweg.torch.sharding.collectives import Computation
from thalweg.torch.sharding.owners import Begun, Owners, SlotWork, Team
from thalweg.torch.sharding.stages import Compute, Layout, Rounds, Stage, take_turns
from thalweg.torch.stacks import most_of_stack

#: Numbers of the arithmetic's precision that are alive for each element at most, beside new values; those where
#: rounding at random makes bits; those that a rule's ``transform`` does not count. Bytes that a tensor needs.
NUMBERS, NUMBERS_OF_RANDOM, NUMBERS_BESIDE_WHOLE, BYTES_OF_TENSOR = 16, 20, 4, 2**14


class Lists:
    """The lists of one optimizer. Whole tensors that this rank owns are kept from step to step."""

    def __init__(self, most: int | None = None, slot: int = SLOT) -> None:
        """most: elements of a stack of whole tensors. slot: how many elements travel to owners at a time."""
        self.owners, self.most = Owners(slot), most

    def lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        return [ListsStep(buckets, self.owners, self.most).layout()]

    def count_temporaries(self, params: Sequence[Param]) -> int:
        """A chunk while it is computed, with its new values and those of the chunk before."""
        by_limit: dict[int, list[tuple[Param, int]]] = defaultdict(list)
        waiting = 0
        for p in params:
            rule, numbers = p.setting.rule_at(1), NUMBERS_OF_RANDOM if p.setting.numerics.is_random else NUMBERS
            limit = CHUNK
            if isinstance(rule, WholeRule):
                numbers = max(numbers, NUMBERS_BESIDE_WHOLE + rule.count_temporaries())
                limit = self.most or most_of_stack(rule, p.device)
            computed = numbers * p.extent * DTYPES[arithmetic(p.dtype)].bytes
            by_limit[limit].append((p, computed + 2 * p.value_bytes + BYTES_OF_TENSOR))
            # nothing is written before all is known to be finite
            waiting += p.value_bytes if p.setting.numerics.on_nonfinite == "raise" else 0
        return max((count_largest(needed, limit) for limit, needed in by_limit.items()), default=0) + waiting

    def forget(self) -> None:
        self.owners.forget()


class ListsStep:
    """A step of buckets as lists: no tables are made for it."""

    def __init__(self, buckets: Sequence[Bucket], owners: Owners, most: int | None) -> None:
        self.owners, self.most, self.buckets = owners, most, buckets
        self.raises = buckets[0].setting.numerics.on_nonfinite == "raise"
        self.whole = [bucket for bucket in buckets if not bucket.parts]
        self.shards = [bucket for bucket in buckets if bucket.parts]
        #: Whole tensors on which replicas divide the work.
        self.replicated: list[Bucket] = []
        if not self.raises:
            self.replicated = [bucket for bucket in self.shards if not any(bucket.parts[0].groups)]
            self.shards = [bucket for bucket in self.shards if any(bucket.parts[0].groups)]
        #: New values that are not written yet.
        self.results: list[Result] = []
        #: By name, what there was to look at in the last step.
        self.figures: dict[str, Mapping[str, Any]] = {}

    def layout(self) -> Layout:
        step: list[Stage] = []
        if self.shards:
            step.append(Rounds(f"new values by torch: {say_buckets(self.shards)}", self.measure_shards))
        if self.raises:
            step.append(Compute(f"new values by torch: {say_buckets(self.whole or self.shards)}", self.measure))
        made = "new values" if self.raises or not self.whole else "new values by torch"
        if written := [*self.whole, *self.shards]:
            step.append(Compute(f"write {made}: {say_buckets(written)}", self.write, writes=True))
        for team, slots in groupby(self.owners.divide(list(map(outline_of, self.replicated))), itemgetter(0)):
            works = [SlotWork(team, *self.ask_replicas(slot)).stages() for _, slot in slots]
            step += take_turns(works)
        names = [name for bucket in self.buckets for name in bucket.names]
        return Layout([], step, {name: partial(read, self.figures, name) for name in names}, self.release)

    def measure_shards(self) -> list[Computation]:
        return [self.measure_bucket(bucket) for bucket in self.shards]

    def measure_bucket(self, bucket: Bucket) -> Computation:
        self.results.append((yield from result_of_shards(bucket, self.owners)))

    def measure(self) -> None:
        """All new values, where nothing may be written before they are known to be finite."""
        self.results[:0] = [result for bucket in self.whole for result in results_of(bucket, self.most)]
        for result in self.results:
            assert result.finite is not None
            flags = torch.stack([finite.reshape(()) for finite in result.finite]).tolist()
            guilty = [name for name, finite in zip(result.bucket.names, flags, strict=True) if not finite]
            result.bucket.table.nonfinite += guilty

    def write(self) -> None:
        """Write new values, which are computed part by part where they are not known yet."""
        measured, self.results = self.results, []
        unmeasured = [] if self.raises else self.whole
        for result in chain(measured, chain.from_iterable(results_of(bucket, self.most) for bucket in unmeasured)):
            self.commit(result)

    def commit(self, result: Result) -> None:
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
        for i, name in enumerate(bucket.names):
            self.figures[name] = {**bucket.rate, **{key: v[i] for key, v in result.stats.items()}}

    def ask_replicas(
        self, slot: Mapping[int, Sequence[int]]
    ) -> tuple[Callable[[Team], Begun], str, Callable[[Sequence[Direction]], None]]:
        """What replicas are asked for the members of a slot, and what takes their answers: it writes new values.

        Slot by slot: new values of few exist at once.
        """
        steps: list[Any] = []

        def begin(team: Team) -> Begun:
            chosen = [self.replicated[at].chosen(members) for at, members in slot.items()]
            steps[:] = [result_of_shards(bucket, self.owners) for bucket in chosen]
            return team.begin_slot([request for step in steps for request in next(step).asked])

        def take(answers: Sequence[Direction]) -> None:
            for step, answer in zip(steps, answers, strict=True):
                try:
                    step.send([answer])
                except StopIteration as end:
                    self.commit(end.value)
            steps.clear()

        names = [name for at, members in slot.items() for name in self.replicated[at].chosen(members).names]
        return begin, f"{len(names)} tensors", take

    def release(self, taken: bool) -> None:
        self.results = []
        if not taken:
            self.owners.forget()


def read(figures: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return dict(figures.get(name, {}))
