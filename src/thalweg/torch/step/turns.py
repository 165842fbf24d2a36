"""A step in turns: buckets whose state is on the host are stepped chunk by chunk, as their state passes the device.

Every chunk is a step of its own for the engines, which know nothing of it. State that has no place in a chunk yet is
given one: it is new, was loaded, or the user put it there.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import torch
from torch import Tensor

from thalweg.kernels.staging import SLOTS, STAGED, aligned, staged, together
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.offload.host import with_local
from thalweg.torch.offload.lanes import LANES, Event
from thalweg.torch.offload.stream import Chunk, Slot, address_of, streamed
from thalweg.torch.params.states import StatefulOptimizer
from thalweg.torch.sharding.shards import local, local_state
from thalweg.torch.step.runs import Runs
from thalweg.torch.wholes import most_whole

#: Lays out buckets, and steps them as one as they are laid out.
LayOut: TypeAlias = Callable[[Sequence[Bucket]], Runs]
Take: TypeAlias = Callable[[Runs, Sequence[Bucket]], None]


@dataclass(frozen=True)
class Share:
    """What a turn has of a bucket."""

    #: The place of the bucket in the step, and of parameters in the bucket.
    place: int
    members: Sequence[int]
    #: With state as it is on the device in this turn; without what each step has anew.
    bucket: Bucket

    def of(self, buckets: Sequence[Bucket]) -> Bucket:
        now = buckets[self.place]
        known = now.addresses
        return replace(
            self.bucket,
            grads=[now.grads[i] for i in self.members],
            addresses=None if known is None else array("Q", [known[i] for i in self.members]),
            lr=now.lr,
            lr_scale=now.lr_scale,
            t=now.t,
            grad_scale=now.grad_scale,
            allowed=now.allowed,
        )


@dataclass(frozen=True)
class Moving:
    """What is moved of the state of a parameter."""

    #: The state itself, and what this rank holds of it, as a bucket has it.
    holders: tuple[dict[str, Tensor], dict[str, Tensor]]
    keys: Sequence[str]
    size: int


class Turns:
    """The turns of one optimizer's steps, remembered as long as its buckets are the same."""

    def __init__(self, most: int = STAGED) -> None:
        self.most = most
        self.slots: dict[torch.device, list[Slot]] = {}
        #: By the address of an entry, the chunk in which it is.
        self.homes: dict[int, Chunk] = {}
        #: By name, the state that was checked.
        self.checked: dict[str, list[Hashable]] = {}
        self.params: list[Sequence[Tensor]] = []
        self.shares: dict[Chunk | None, list[Share]] = {}
        #: By turn, how its buckets are laid out.
        self.runs: dict[int, Runs] = {}

    def forget(self) -> None:
        """Let go of all chunks: state was replaced."""
        self.homes, self.checked, self.params, self.shares, self.runs = {}, {}, [], {}, {}

    @property
    def chunks(self) -> set[Chunk]:
        return set(self.homes.values())

    def take(
        self,
        optimizer: StatefulOptimizer,
        buckets: Sequence[Bucket],
        lay_out: LayOut,
        take: Take,
        *,
        writes: bool = True,
    ) -> None:
        """Step buckets in turns. writes: whether state changes."""
        params = [bucket.params for bucket in buckets]
        if len(params) != len(self.params) or any(a is not b for a, b in zip(params, self.params, strict=True)):
            self.divide(optimizer, buckets)
        chunks, shares = list(self.shares), list(self.shares.values())

        def take_turn(turn: int) -> None:
            own = [share.of(buckets) for share in shares[turn]]
            if turn not in self.runs:
                self.runs[turn] = lay_out(own)
            take(self.runs[turn], own)

        def sent(chunk: Chunk, event: Event) -> None:
            optimizer._host.pending[chunk.lanes] = event

        streamed(chunks, take_turn, sent if writes else None)

    # ---- who is stepped when

    def divide(self, optimizer: StatefulOptimizer, buckets: Sequence[Bucket]) -> None:
        """Find for each parameter the turn in which it is stepped: the first is of those without state on the host."""
        named = {name: p for p, (name, _) in optimizer._places().items()}
        self.check(optimizer, named, buckets)
        self.give_homes(optimizer, named, buckets)
        self.checked.update((name, facts_of(s)) for bucket in buckets for name, s in states_of(bucket))
        found: dict[Chunk | None, list[Share]] = defaultdict(list)
        for place, bucket in enumerate(buckets):
            states = [local_state(optimizer.state[named[name]]) for name in bucket.names]
            members: dict[Chunk | None, list[int]] = defaultdict(list)
            for i, (name, s) in enumerate(zip(bucket.names, states, strict=True)):
                keys = keys_on_host(optimizer, named[name], name, bucket)
                chunk = self.home(s, keys, bucket.params[0].device)
                members[chunk].append(i)
                if chunk is None and any(address_of(entry) in self.homes for entry in s.values()):
                    optimizer._host.wait()  # the parameter has moved to the host, where no lane waits
                if chunk is not None:
                    s.update({key: chunk.on_device(s[key]) for key in keys})
            for chunk, some in members.items():
                own = replace(bucket, states=states).chosen(some)
                found[chunk].append(Share(place, some, replace(own, grads=())))
        self.shares = dict(sorted(found.items(), key=lambda pair: -1 if pair[0] is None else pair[0].number))
        self.params, self.runs = [bucket.params for bucket in buckets], {}

    def check(self, optimizer: StatefulOptimizer, named: Mapping[str, Tensor], buckets: Sequence[Bucket]) -> None:
        """Refuse state that does not fit before the first turn: engines would look at it in its own."""
        for bucket in buckets:
            for name, s in states_of(bucket):
                if self.checked.get(name) != facts_of(s):
                    optimizer._check_state(name, named[name], bucket.setting)

    def home(self, state: Mapping[str, Tensor], keys: Sequence[str], device: torch.device) -> Chunk | None:
        """The chunk of this device in which all these entries are; None if there is none."""
        found = {self.homes.get(address_of(state[key])) for key in keys}
        chunk = found.pop() if len(found) == 1 else None
        return chunk if chunk is not None and chunk.slot in self.slots.get(device, ()) else None

    # ---- where state is

    def give_homes(self, optimizer: StatefulOptimizer, named: dict[str, Tensor], buckets: Sequence[Bucket]) -> None:
        """Move entries that belong on the host, and are in no chunk, into new ones."""
        homeless: dict[torch.device, list[list[Moving]]] = defaultdict(list)
        for bucket in buckets:
            device = bucket.params[0].device
            for unit in together(bucket.setting.rule_at(1), bucket.shape, bucket.extents, most_whole(device)):
                moving = []
                for i in unit:
                    p, s = named[bucket.names[i]], bucket.states[i]
                    keys = keys_on_host(optimizer, p, bucket.names[i], bucket)
                    if keys and self.home(s, keys, device) is None:
                        holders = optimizer.state[p], cast(dict[str, Tensor], s)
                        moving.append(Moving(holders, keys, size_everywhere(bucket, i, keys)))
                if moving:
                    homeless[device].append(moving)
        if not homeless:
            return
        optimizer._host.wait()
        optimizer._forget_memory()  # which would keep what is moved
        for device, units in homeless.items():
            if device not in self.slots:
                lanes = LANES[device.type](device)
                self.slots[device] = [Slot(lanes) for _ in range(SLOTS)]
            sizes = [sum(each.size for each in unit) for unit in units]
            for members, slot in staged(sizes, len(self.chunks), self.most):
                self.move([each for i in members for each in units[i]], self.slots[device][slot])
        addresses = (address_of(local(entry)) for s in optimizer.state.values() for entry in s.values())
        used = {self.homes[address] for address in addresses if address in self.homes}
        self.homes = {address: chunk for address, chunk in self.homes.items() if chunk in used}

    def move(self, moving: Sequence[Moving], slot: Slot) -> None:
        """Move entries into a new chunk."""
        entries = [(*each.holders, key) for each in moving for key in each.keys]
        begins = [0]
        for _, held, key in entries:
            begins.append(begins[-1] + aligned(max(1, held[key].nbytes)))
        number = 1 + max((chunk.number for chunk in self.chunks), default=-1)
        chunk = Chunk(begins[-1], slot, number)
        for (state, held, key), begin in zip(entries, begins, strict=False):
            held[key] = chunk.place(held[key], begin).copy_(held[key])
            state[key] = with_local(state[key], held[key])
            self.homes[address_of(held[key])] = chunk


def states_of(bucket: Bucket) -> Iterable[tuple[str, Mapping[str, Tensor]]]:
    return zip(bucket.names, bucket.states, strict=True)


def facts_of(state: Mapping[str, Tensor]) -> list[Hashable]:
    """What changes when an entry is replaced."""
    return [(key, entry.data_ptr(), entry.shape, entry.dtype) for key, entry in state.items()]


def keys_on_host(optimizer: StatefulOptimizer, p: Tensor, name: str, bucket: Bucket) -> list[str]:
    return optimizer._host.keys(name, p, bucket.setting.rule_at(1), list(optimizer.state[p]))


def size_everywhere(bucket: Bucket, index: int, keys: Sequence[str]) -> int:
    """The bytes of some entries of a parameter, the same on all ranks: they have to take the same turns."""
    entries = [bucket.states[index][key] for key in keys]
    if not bucket.parts:
        return sum(aligned(entry.nbytes) for entry in entries)
    part = bucket.parts[index]
    ranks: int = math.prod(group.mesh.size(group.dimension) for group in part.across(None))
    codes = sum(entry.element_size() for key, entry in zip(keys, entries, strict=True) if not key.endswith("_scale"))
    return -(-math.prod(part.shape) * codes // ranks)
