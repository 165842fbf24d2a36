"""All stacks of whole tensors in a run: what their steps have in common is found once, and not for each stack."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.kron_batches import has_plain_numbers
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.replay import Moving
from thalweg.torch.engines.triton_whole import NUMBERED, UNKNOWN, Stack, WholeLaunch, decide_by

#: Launches that are numbered at once.
MOST_NUMBERED = 64


class WholeBatches:
    """Launches that are stepped together, as long as nothing changes but gradients, rates and counts."""

    def __init__(self, launches: Sequence[WholeLaunch], moving: Moving) -> None:
        self.launches, self.moving = launches, moving
        #: What the last step had beside that; nothing: each launch has to look for itself.
        self.given: list[Any] = []
        self.stacks: list[Stack] = []
        self.host_counts: Mapping[str, HostCounts] = {}
        self.together = False
        self.due: Any = None
        self.after: Mapping[str, float] = {}
        #: By what is due, a number for all launches; and by what these depend on.
        self.keys: dict[Any, int] = {}
        self.numbers: dict[Hashable, int] = {}

    def note(self, buckets: Sequence[Bucket]) -> None:
        """Remember what each launch has found out for itself, if the next steps can be like this one."""
        self.given, self.keys = [], {}
        stacks = [stack for launch in self.launches for stack in launch.stacks]
        tables = [stack.first.passes.tables for stack in stacks]
        is_joint = all(part.moving is not None for launch in self.launches for part in launch.parts())
        is_alike = len({(stack.due, stack.counted, *stack.host_counts) for stack in stacks}) == 1
        if not is_joint or not is_alike or not has_plain_numbers(buckets):
            return
        if not all(table.grads_aligned and table.count == len(table.grad_places) for table in tables):
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
            self.host_counts = {key: HostCounts([s[key] for own in stacks for s in own.states]) for key in keys}
        self.given = [buckets[0].grad_scale, *(bucket.setting for bucket in buckets)]
        self.noise_counts = [stack.t for stack in stacks if stack.t is not None]
        self.rules = {id(stack.rule): (stack.rule, stack.key) for stack in stacks}
        self.due, self.t = stacks[0].due, stacks[0].counted
        self.rates = [(bucket.lr, bucket.lr_scale) for bucket in buckets]

    def prepare(self, buckets: Sequence[Bucket]) -> bool:
        """Take the gradients and numbers of a step; False if each launch has to look for itself: nothing is done."""
        from thalweg.kernels.triton.tables import are_aligned

        was_together, self.together = self.together, False
        given = [buckets[0].grad_scale, *(bucket.setting for bucket in buckets)]
        may_repeat = self.given and are_the_same(given, self.given) and has_plain_numbers(buckets)
        if may_repeat and not any(launch.is_stale() for launch in self.launches):
            addresses = array("Q", b"".join([bucket.addresses for bucket in buckets]))  # type: ignore[misc]
            self.together = are_aligned(addresses) and self.decide(buckets)
        if not self.together:
            for stack in self.stacks if was_together else ():  # what it has noted is not what is there
                stack.first.passes.tables.grad_places, stack.counted = UNKNOWN, -1
            return False
        self.moving.put(self.places, array("Q", [addresses[i] for i in self.order]))
        rates = [(bucket.lr, bucket.lr_scale) for bucket in buckets]
        for launch, bucket in zip(self.launches, buckets, strict=True):
            launch.begin(bucket, bucket.grads)
            for stack in launch.stacks if rates != self.rates else ():
                self.moving.rate(stack.last.moving[1], cast(Any, bucket.lr), bucket.lr_scale)
        for t in self.noise_counts:
            t.fill_(self.t)
        for stack in self.stacks if self.due != self.stacks[0].due else ():
            stack.due = self.due
        self.rates = rates
        return True

    def decide(self, buckets: Sequence[Bucket]) -> bool:
        """By the counts that the host keeps, what is due; False if they are not the same for all, or not the next."""
        t = buckets[0].t
        if any(bucket.t != t for bucket in buckets) or t not in (None, self.t + 1):
            return False
        counts = tuple([(key, own.read()) for key, own in self.host_counts.items() if key != "step"])
        if any(count is None for _, count in counts):
            return False
        found = [decide_by(*rule, counts, t) for rule in self.rules.values()] if counts else [(self.due, {})]
        if any(each != found[0] for each in found):
            return False
        (self.due, self.after), self.t = found[0], self.t if t is None else t
        return True

    def key(self) -> int:
        """A number for what the launches of all stacks depend on beside tables."""
        if not self.together or self.due not in self.keys:
            whole = tuple([launch.key() for launch in self.launches])
            if whole not in self.numbers and len(self.numbers) == MOST_NUMBERED:
                self.numbers.clear()
            self.keys[self.due] = self.numbers.setdefault(whole, next(NUMBERED))
        return self.keys[self.due]

    def count_step(self) -> None:
        """The step is taken."""
        if not self.together:
            for launch in self.launches:
                launch.count_step()
            return
        if "step" in self.host_counts:
            self.host_counts["step"].advance()
        for key, count in self.after.items():
            if count != self.host_counts[key].read():
                self.host_counts[key].write(count)
