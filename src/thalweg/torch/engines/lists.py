"""The engine whose arithmetic is torch's own: it answers with new values, and then copies them into place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import chain

import torch

from thalweg.kernels.chunks import STACK
from thalweg.rules.whole import SLOT
from thalweg.torch.engines.protocol import Bucket, CheckState, Statistics
from thalweg.torch.engines.results import Result, results_of
from thalweg.torch.engines.shards import result_of_shards
from thalweg.torch.sharding.collectives import Computation
from thalweg.torch.sharding.owners import Owners


class Lists:
    """The lists of one optimizer. Whole tensors that this rank owns are kept from step to step."""

    def __init__(self, message_dtype: str | None = None, most: int = STACK, slot: int = SLOT) -> None:
        """message_dtype: the codes in which tensors travel, slot: how many elements at a time.

        most: elements of a stack of small tensors.
        """
        self.owners, self.most = Owners(message_dtype, slot), most

    def lay_out(self, buckets: Sequence[Bucket], check_state: CheckState) -> ListsRun:
        return ListsRun(self.owners, self.most)

    def forget(self) -> None:
        self.owners.forget()


class ListsRun:
    """One step of buckets as lists: nothing is laid out."""

    def __init__(self, owners: Owners, most: int) -> None:
        self.owners, self.most = owners, most
        self.buckets: Sequence[Bucket] = ()
        self.results: list[Result] = []

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        self.buckets, self.results = buckets, []

    # Under torch.compile the arithmetic of each bucket is compiled; what surrounds it runs as it is.
    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All new values if nothing may be written before they are known; else those of shards alone."""
        sharded = [part for bucket in self.buckets if bucket.parts for part in chunks_alike(bucket)]
        self.buckets = [bucket for bucket in self.buckets if not bucket.parts]
        if on_nonfinite == "raise":
            self.results = [result for bucket in self.buckets for result in results_of(bucket, self.most)]
            self.buckets = ()
        return [self.measure_bucket(bucket) for bucket in sharded]

    def measure_bucket(self, bucket: Bucket) -> Computation:
        self.results.append((yield from result_of_shards(bucket, self.owners)))

    @torch.compiler.disable
    def nonfinite(self) -> list[str]:
        guilty = []
        for result in self.results:
            assert result.finite is not None
            flags = torch.stack([finite.reshape(()) for finite in result.finite]).tolist()
            guilty += [name for name, finite in zip(result.bucket.names, flags, strict=True) if not finite]
        return guilty

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call]
    def write(self) -> Statistics:
        statistics: Statistics = {}
        known, self.results = self.results, []
        for result in chain(known, chain.from_iterable(results_of(bucket, self.most) for bucket in self.buckets)):
            statistics.update(committed(result))
        return statistics

    def release(self, *, taken: bool) -> None:
        self.buckets, self.results = (), []
        if not taken:
            self.owners.forget()


def chunks_alike(bucket: Bucket) -> list[Bucket]:
    """Chunks that are the same on every rank: not of shards, whose sizes may differ."""
    return [bucket] if any(bucket.parts[0].groups) else bucket.chunks()


@torch.compiler.disable
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
