"""What the stacks of a run have in common, found once for a step as long as steps repeat, and not for each stack."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import Tensor

from thalweg.programs.parts import decide_by
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.replay import ArgumentTable
from thalweg.torch.engines.triton_whole import NUMBERED, UNKNOWN, Stack, WholeLaunch

#: Launches that are numbered at once.
MOST_NUMBERED = 64


class RepeatedStacks:
    """Stacks of whole tensors that are stepped together, as long as nothing changes but gradients, rates and counts."""

    def __init__(self, launches: Sequence[WholeLaunch], moving: ArgumentTable) -> None:
        self.launches, self.moving = launches, moving
        self.stacks: list[Stack] = []
        #: What the last step had beside gradients, rates and counts; nothing: each launch has to look for itself.
        self.given: list[Any] = []
        #: Rules, each with the key of what it keeps, and the counts of all parameters that the host keeps.
        self.rules: dict[int, tuple[Any, str]] = {}
        self.counts: Mapping[str, HostCounts] = {}
        #: Whether this step repeats; then what is due, and what counts are after it.
        self.together = False
        self.due: Any = None
        self.after: Mapping[str, float] = {}
        #: A number for all launches: by what is due, where these repeat, and by their keys.
        self.keys: dict[Any, int] = {}
        self.numbers: dict[Hashable, int] = {}

    def note(self, buckets: Sequence[Bucket]) -> None:
        """Remember what each launch has found out for itself, if the next steps can be like this one."""
        self.given, self.keys = [], {}
        stacks = [stack for launch in self.launches for stack in launch.stacks]
        tables = [stack.first.passes.tables for stack in stacks]
        is_joint = all(part.moving is not None for launch in self.launches for part in launch.parts())
        is_alike = len({(stack.due, stack.counted, *stack.host_counts) for stack in stacks}) == 1
        are_read_alike = all(table.grads_aligned and table.count == len(table.grad_places) for table in tables)
        if not is_joint or not is_alike or not are_read_alike:
            return
        if not are_the_same(stacks, self.stacks):
            self.stacks = stacks
            first, last = (self.moving.places[id(table)] for table in (tables[0], tables[-1]))
            # where the addresses of all gradients are, side by side, and in which order
            self.places, self.order, begin = slice(first.start, last.stop), list[int](), 0
            for launch, bucket in zip(self.launches, buckets, strict=True):
                self.order += [begin + i for i in chain.from_iterable(launch.members)]
                begin += len(bucket.names)
            keys = stacks[0].host_counts
            self.counts = {key: HostCounts([s[key] for stack in stacks for s in stack.states]) for key in keys}
        self.given = given_in(buckets)
        self.noise_counts = [stack.t for stack in stacks if stack.t is not None]
        self.rules = {id(stack.rule): (stack.rule, stack.key) for stack in stacks}
        self.due, self.t = stacks[0].due, stacks[0].counted
        self.rates = [(bucket.lr, bucket.lr_scale) for bucket in buckets]

    def prepare(self, buckets: Sequence[Bucket]) -> bool:
        """Take the gradients and numbers of a step; False if each launch has to look for itself: nothing is done."""
        from thalweg.kernels.triton.tables import are_aligned

        was_together, self.together = self.together, False
        given = given_in(buckets)
        if given and are_the_same(given, self.given):
            addresses = array("Q", b"".join([bucket.addresses for bucket in buckets]))  # type: ignore[misc]
            decided = self.decide(buckets)
            if decided is not None and are_aligned(addresses) and self.serves(buckets[0].t):
                self.together, (self.due, self.after) = True, decided
                self.take(buckets, addresses)
        if was_together and not self.together:
            for stack in self.stacks:  # what they have noted is not what is there
                stack.first.passes.tables.grad_places, stack.counted = UNKNOWN, -1
        return self.together

    def serves(self, t: int | None) -> bool:
        """Whether what is remembered still holds for this step. t: its number, if the host counts."""
        return t in (None, self.t + 1) and not any(launch.is_stale() for launch in self.launches)

    def decide(self, buckets: Sequence[Bucket]) -> tuple[Any, Mapping[str, float]] | None:
        """What is due in this step, and the counts after it, by those on the host; None if stacks differ in that."""
        t = buckets[0].t
        counts: Any = {key: count.read() for key, count in self.counts.items() if key != "step"}
        if any(bucket.t != t for bucket in buckets) or None in counts.values():
            return None
        if not counts:
            return self.due, {}
        first, *others = [decide_by(*rule, counts, cast(int, t)) for rule in self.rules.values()]
        return first if all(other == first for other in others) else None

    def take(self, buckets: Sequence[Bucket], addresses: array[int]) -> None:
        """Take the gradients and numbers of a step."""
        self.t = self.t if buckets[0].t is None else buckets[0].t
        self.moving.put(self.places, array("Q", [addresses[i] for i in self.order]))
        rates = [(bucket.lr, bucket.lr_scale) for bucket in buckets]
        for launch, bucket in zip(self.launches, buckets, strict=True):
            launch.begin(bucket, bucket.grads)
            for stack in launch.stacks if rates != self.rates else ():
                self.moving.rate(stack.last.moving[1], cast(Any, bucket.lr), bucket.lr_scale)
        for t in self.noise_counts:
            t.fill_(self.t)
        for stack in self.stacks:
            stack.take_due(self.due)
            stack.follow_factors()
        self.rates = rates

    def key(self) -> int:
        """A number for what all launches depend on beside tables."""
        if self.together and self.due in self.keys:
            return self.keys[self.due]
        whole = tuple([launch.key() for launch in self.launches])
        if whole not in self.numbers and len(self.numbers) == MOST_NUMBERED:
            self.numbers.clear()
        number = self.numbers.setdefault(whole, next(NUMBERED))
        if self.together:
            self.keys[self.due] = number
        return number

    def count_step(self) -> None:
        """Count a step that was taken."""
        if not self.together:
            for launch in self.launches:
                launch.count_step()
            return
        if "step" in self.counts:
            self.counts["step"].advance()
        for key, count in self.after.items():
            if count != self.counts[key].read():
                self.counts[key].write(count)


def given_in(buckets: Sequence[Bucket]) -> list[Any]:
    """What a step has beside gradients, rates and counts; nothing if the host does not know all that it begins with."""
    for bucket in buckets:
        if bucket.addresses is None or isinstance(bucket.lr, Tensor) or bucket.allowed is not None:
            return []
    return [buckets[0].grad_scale, *(bucket.setting for bucket in buckets)]
