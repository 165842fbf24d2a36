"""Rules that need whole tensors on GPUs: fused kernels for what goes element by element, products between them.

Tensors of one shape are one stack. What is shown of them is written into memory that all buckets share.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.dtypes import DTYPES
from thalweg.kernels.chunks import FACTORS_CHUNK, WHOLE_CHUNK, pieces
from thalweg.programs.parts import decide_by, first_part, last_part, own_key, shown_keys
from thalweg.programs.trace import PARAMETER
from thalweg.rules import Direction, WholeRule
from thalweg.rules.around import keys_around
from thalweg.rules.entries import Count, PerSlice
from thalweg.rules.noise import tensor_id
from thalweg.settings import Numerics, ParameterOptions
from thalweg.spaces import torch as xp
from thalweg.spaces.foreach import TensorList
from thalweg.storage import RECORD, arithmetic
from thalweg.torch.engines.counts import HostCounts
from thalweg.torch.engines.memory import join_memory
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.results import request_of
from thalweg.torch.params.parameter import Param, count_largest
from thalweg.torch.sharding.owners import Owners
from thalweg.torch.sharding.requests import Request
from thalweg.torch.stacks import space_of_kernels

NUMBERED = itertools.count()
#: Elements after which what is shown of another tensor may begin.
ALIGNED = 64
#: What a library's products need for themselves.
BYTES_OF_LIBRARY = 2**25
#: How many stacks are transformed side by side, and elements of a bucket that has a lane beside others: few, so that
#: its kernels leave most of a GPU idle.
LANES, MOST_IN_LANE = 4, 2**21
#: Lays out the kernels of a rule that is stepped element by element, for a bucket.
LayOut: TypeAlias = Callable[[Bucket], Any]


class ScratchBuffer:
    """Memory that stacks use in turn, as much as the largest of them needs."""

    def __init__(self, most: int = WHOLE_CHUNK) -> None:
        """most: elements of a stack."""
        self.most = most
        self.memory: dict[torch.device, Tensor] = {}

    def reserve(self, count: int, bucket: Bucket) -> Tensor:
        """Memory for what is shown of so many elements, in the dtype in which the rule of a bucket transforms them."""
        rule, device = cast(WholeRule, bucket.setting.stored_rule), bucket.params[0].device
        dtype = getattr(torch, rule.whole_dtype("float32"))
        wanted = count * rule.whole_tensors() * dtype.itemsize
        if device not in self.memory or self.memory[device].numel() < wanted:
            self.memory[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
        return self.memory[device][:wanted].view(dtype)


def count_stacks(params: Sequence[Param]) -> int:
    """Bytes of the largest stack as it is transformed, its factors in float32, and of what rules derive from these."""
    needed: dict[bool, list[tuple[Param, int]]] = {True: [], False: []}
    derived_bytes = 0
    for p in params:
        rule = cast(WholeRule, p.setting.rule_at(1))
        copies = sum(math.prod(p.entries[key][0]) for key in rule.keys(p.shape, PerSlice))
        numbers = rule.count_temporaries() * DTYPES[rule.whole_dtype(arithmetic(p.dtype))].bytes * p.extent
        needed[rule.has_factors].append((p, numbers + 4 * copies))
        if type(rule).keep is not WholeRule.keep:
            derived_bytes += 4 * copies
    largest = max(count_largest(needed[True], FACTORS_CHUNK), count_largest(needed[False], WHOLE_CHUNK))
    small = [(p, bytes_) for several in needed.values() for p, bytes_ in several if p.extent <= MOST_IN_LANE]
    largest += count_largest(small, (LANES - 1) * MOST_IN_LANE)
    return largest + derived_bytes + BYTES_OF_LIBRARY if params else 0


class Stack:
    """Tensors of one shape that are transformed as one, with the kernels of the parts before and after that."""

    def __init__(self, bucket: Bucket, scratch: Tensor, by_elements: LayOut) -> None:
        """scratch: memory for the stack."""
        setting, rule = bucket.setting, cast(WholeRule, bucket.setting.stored_rule)
        count, shape, device = len(bucket.params), tuple(bucket.params[0].shape), bucket.params[0].device
        self.key, self.around = own_key(rule, bucket.shape), keys_around(rule, bucket.shape)
        self.scratch, self.shown = scratch, scratch.view(rule.whole_tensors(), count, *shape).unbind()
        self.states, self.ids = bucket.states, [tensor_id(name) for name in bucket.names]
        #: Entries with a shape of their own, which are whole tensors too, and those that the host decides by.
        self.whole_keys, self.counts = rule.keys(bucket.shape, PerSlice), rule.keys(bucket.shape, Count)
        #: Of each of the former, the entries of all as one array, if their memory could be joined.
        self.joint = {key: join_memory([s[key] for s in bucket.states]) for key in self.whole_keys}
        #: Whether what ``transform`` makes of them is what lies there after the step.
        self.is_kept_exactly = all(s[key].dtype == torch.float32 for s in bucket.states for key in self.whole_keys)
        self.space = space_of_kernels()
        #: Unlike an id, never that of a stack that is gone.
        self.number = next(NUMBERED)
        self.due: Any = True
        #: Whether what 1 is due for comes after the step, for all tensors at once.
        self.refreshes_after = rule.refreshes_apart()
        #: The options that the middle part has read: other numbers are another step.
        self.read: set[str] = set()
        #: What the rule makes of these entries, where recorded steps find it, and their versions then.
        self.derived: dict[str, Tensor] = {}
        self.derives = bool(self.whole_keys)
        self.versions: list[int] = []
        #: On the device, whether the step is taken; None: it is.
        self.allowed: Tensor | None = None
        #: Counts for kernels where the host counts, and the count for random numbers, which equal stacks share.
        self.steps = None if rule.IN_PARTS else torch.zeros(count, device=device)
        self.t: Tensor | None = None
        #: What statistics show, where replayed steps find it.
        self.figures: dict[str, Tensor] = {}
        self.settle(setting)
        self.first, self.last = by_elements(self.for_first(bucket)), by_elements(self.for_last(bucket))

    def settle(self, setting: ParameterOptions) -> None:
        """Take the options of a step."""
        rule = cast(WholeRule, setting.stored_rule)
        self.setting, self.rule = setting, rule
        self.whole = watch(replace(rule, stacked_axes=rule.stacked_axes + 1), self.read)
        # the step is counted by the last part, which has the parameter: the options of steps are for one part each
        numerics = Numerics(maximize=setting.numerics.maximize)
        self.first_setting = replace(setting, rule=first_part(rule), numerics=numerics)
        numerics = Numerics(rounding=setting.numerics.rounding, seed=setting.numerics.seed)
        self.last_setting = replace(setting, rule=last_part(rule, self.due), numerics=numerics)

    def take_due(self, due: Any) -> None:
        """Note what is due in this step, and give it to the last part."""
        if due != self.due:
            self.due = due
            self.last_setting = replace(self.last_setting, rule=last_part(self.rule, due))
            self.last.passes.follow(self.last_setting.stored_rule)

    def step_counts(self) -> Sequence[Tensor]:
        """Where kernels read and count the steps of each."""
        return [s["step"] for s in self.states] if self.steps is None else self.steps.unbind()

    def for_first(self, bucket: Bucket) -> Bucket:
        keys = shown_keys(self.rule)
        states = [
            {**dict(zip(keys, x, strict=True)), "step": step}
            | pick_entries(s, {scale_key(self.key): scale_key(PARAMETER)})
            for *x, step, s in zip(*self.shown, self.step_counts(), bucket.states, strict=True)
        ]
        momenta = [s[self.key] for s in bucket.states]
        return replace(bucket, params=momenta, states=states, setting=self.first_setting, lr=1.0, lr_scale=1.0)

    def for_last(self, bucket: Bucket) -> Bucket:
        beside = {key: key for key in (RECORD, *self.around)}
        pairs = zip(self.step_counts(), bucket.states, strict=True)
        states = [{"step": step, **pick_entries(s, beside)} for step, s in pairs]
        return replace(bucket, grads=self.shown[0].unbind(), states=states, setting=self.last_setting)

    def take(self, step: Any, first: Any) -> None:
        """Take the numbers of a step. first: those of the first part, which knows no rate."""
        self.allowed = step.allowed
        self.first.take(self.first_setting, first)
        self.last.take(self.last_setting, step._replace(grad_scale=None))

    def key_of_launches(self) -> Hashable:
        """What its launches depend on beside tables and what is due."""
        numbers = tuple([getattr(self.rule, name) for name in sorted(self.read)])
        return self.number, numbers, self.first.key(), self.last.key()

    def follow_factors(self) -> None:
        """Where the user or a checkpoint has written factors, derive again what the rule derives from them."""
        if self.derives and (versions := self.read_versions()) != self.versions:
            self.versions = versions
            self.derive(self.stacked())
            self.derives = bool(self.derived)  # most rules derive nothing

    def read_versions(self) -> list[int]:
        return [s[key]._version for s in self.states for key in self.whole_keys]

    def stacked(self) -> dict[str, Tensor]:
        return {
            key: (torch.stack([s[key] for s in self.states]) if x is None else x).float()
            for key, x in self.joint.items()
        }

    def derive(self, state: Mapping[str, Tensor]) -> None:
        self.put_derived(self.whole.keep(self.space, dict(state), tuple(self.shown[0].shape)))

    def put_derived(self, derived: Mapping[str, Tensor]) -> None:
        if not self.derived:
            self.derived = {key: torch.empty_like(x) for key, x in derived.items()}
        for key, x in derived.items():
            self.derived[key].copy_(x)

    def write(self) -> None:
        self.show()
        if self.derived and not self.due:
            direction = cast(Any, self.whole).transform(self.space, self.shown, {}, due=False, kept=self.derived)
        else:
            direction = self.transform()
        for key, figure in self.whole.show_figures(xp, direction.figures, self.due).items():
            self.note_figure(key, figure)
        self.apply(direction.tensor.contiguous().unbind())

    def transform(self) -> Direction:
        """The direction, with new factors if they are due."""
        state = self.stacked()
        due = False if self.refreshes_after and self.due == 1 else self.due
        known: dict[str, Any] = {"kept": self.derived} if self.derived else {}
        direction = self.whole.transform(self.space, self.shown, state, due=due, noise=self.draw, **known)
        if not due and not self.rule.learns_always:
            return direction
        for key, stack in direction.state.items():
            if stack.data_ptr() == state[key].data_ptr():
                continue  # it is as it was
            new = stack if self.allowed is None else torch.where(self.allowed, stack, state[key])
            if (joint := self.joint[key]) is not None:
                state[key] = joint.copy_(new.view_as(joint)).float()
            else:
                entries = [s[key] for s in self.states]
                state[key] = new.to(entries[0].dtype).float()
                torch._foreach_copy_(entries, list(state[key].unbind()))
        if self.derived:
            if direction.kept and self.allowed is None and self.is_kept_exactly:
                self.put_derived(direction.kept)
            else:
                self.derive(state)
            self.versions = self.read_versions()
        return direction

    def show(self) -> None:
        from thalweg.kernels.triton.stages import WRITE

        passes = self.first.passes
        passes.go(self.first.step, passes.last, WRITE)

    def apply(self, tensors: Sequence[Tensor]) -> None:
        self.last.passes.tables.follow(tensors)
        self.last.write()  # launches are in order: what the next stack allocates may lie where these tensors were

    def draw(self) -> Tensor:
        """The noise of these tensors."""
        from thalweg.kernels.triton.noise import draw_normal

        noise = torch.empty_like(self.shown[0], dtype=torch.float32)
        return draw_normal(noise, seed=self.setting.numerics.seed, tensors=self.ids, t=cast(Tensor, self.t))

    def note_figure(self, key: str, figure: Any) -> None:
        if key not in self.figures:
            self.figures[key] = torch.zeros(getattr(figure, "shape", ()), device=self.scratch.device)
        self.figures[key].copy_(figure) if isinstance(figure, Tensor) else self.figures[key].fill_(figure)


def watch(rule: WholeRule, read: set[str]) -> WholeRule:
    """A copy of the rule that notes the names of the options that are read of it. read: takes them down."""
    names = {field.name for field in fields(rule)}

    def look_up(self: WholeRule, name: str) -> Any:
        if name in names:
            read.add(name)
        return object.__getattribute__(self, name)

    watched = copy(rule)
    object.__setattr__(watched, "__class__", type(type(rule).__name__, (type(rule),), {"__getattribute__": look_up}))
    return watched


def refresh_after(stacks: Sequence[Stack], most: int = 2 * FACTORS_CHUNK) -> None:
    """Change what rules change after a step, for all tensors of equal rules at once."""
    by_rule: dict[WholeRule, list[Stack]] = defaultdict(list)
    for stack in stacks:
        if stack.refreshes_after and stack.due == 1:
            by_rule[stack.rule].append(stack)
    for rule, alike in by_rule.items():
        rows = [(stack, s) for stack in alike for s in stack.states]
        states = [{key: s[key].float() for key in stack.whole_keys} for stack, s in rows]
        shapes = [tuple(stack.shown[0].shape[1:]) for stack, _ in rows]
        for i, entries in rule.refresh(alike[0].space, states, shapes, most):
            stack, s = rows[i]
            for key, x in entries.items():
                s[key].copy_(x if stack.allowed is None else torch.where(stack.allowed, x, s[key]))


class CountedStacks:
    """Stacks that the host counts alike, and what it decides for them in a step."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.stacks: list[Stack] = []
        self.after: Mapping[str, float] = {}
        self.due: Any = True

    def finish(self) -> CountedStacks:
        """All stacks are there."""
        stack = self.stacks[0]
        self.keys = stack.counts
        keys = [*self.keys, *(() if stack.steps is None else ["step"])]
        self.host_counts = {key: HostCounts([s[key] for x in self.stacks for s in x.states]) for key in keys}
        #: The count that kernels have of steps, and the one for random numbers.
        self.counted, self.t = -1, None
        if stack.rule.needs_noise:
            self.t = torch.zeros((), dtype=torch.int64, device=stack.scratch.device)
        for stack in self.stacks:
            stack.t = self.t
        return self

    def prepare(self) -> bool:
        """Decide what is due in this step; False if these stacks are no longer alike."""
        setting, t = self.buckets[0].setting, self.buckets[0].t
        if any(bucket.setting is not setting or bucket.t != t for bucket in self.buckets):
            return False
        for stack in self.stacks:
            if stack.setting is not setting:
                stack.settle(setting)
        if self.keys:
            known: Any = {key: self.host_counts[key].read() for key in self.keys}
            if None in known.values():
                return False
            self.due, self.after = decide_by(self.stacks[0].rule, self.stacks[0].key, known, cast(int, t))
        for stack in self.stacks:
            stack.take_due(self.due)
            stack.follow_factors()
        if self.t is not None:
            self.t.fill_(cast(int, t))
        if "step" in self.host_counts:
            for stack in self.stacks if self.counted + 1 != t else ():  # else the last step has counted it
                cast(Tensor, stack.steps).fill_(cast(int, t) - 1)
            self.counted = cast(int, t)
        return True

    def count_step(self) -> None:
        """The step is taken: count it where the host does."""
        allowed = self.buckets[0].allowed if self.host_counts else None
        if allowed is not None and not allowed:
            return
        if "step" in self.host_counts:
            self.host_counts["step"].advance()
        for key, count in self.after.items():
            if count != self.host_counts[key].read():
                self.host_counts[key].write(count)


def count_together(launches: Sequence[WholeLaunch]) -> list[CountedStacks]:
    """Stacks by what the host decides for them."""
    together: dict[Hashable, CountedStacks] = {}
    for launch in launches:
        for stack in launch.stacks:
            bucket, counts = launch.bucket, [(key, float(stack.states[0][key])) for key in stack.counts]
            counted = together.setdefault((id(bucket.setting), stack.key, bucket.t, *counts), CountedStacks())
            counted.buckets.append(bucket)
            counted.stacks.append(stack)
    return [counted.finish() for counted in together.values()]


class WholeLaunch:
    """One bucket of a rule that needs whole tensors."""

    def __init__(self, bucket: Bucket, buffer: ScratchBuffer, by_elements: LayOut, lane: int = 0) -> None:
        """lane: buckets of one lane share a buffer, and follow one another."""
        self.buffer, self.by_elements, self.lane, self.bucket = buffer, by_elements, lane, bucket
        self.stacks: list[Stack] = []
        self.rate: dict[str, Any] = {}
        self.lay_out()

    def lay_out(self) -> None:
        bucket = self.bucket
        extents, has_factors = bucket.extents, bucket.setting.rule.has_factors
        most = min(self.buffer.most, FACTORS_CHUNK) if has_factors else self.buffer.most
        self.members: list[Sequence[int]] = [
            [alike[i] for i in piece] for alike in bucket.alike() for piece in pieces([extents[i] for i in alike], most)
        ]
        sizes = [len(members) * bucket.params[members[0]].numel() for members in self.members]
        memory, pairs = self.buffer.reserve(max(sizes), bucket), zip(self.members, sizes, strict=True)
        shown = cast(WholeRule, bucket.setting.rule).whole_tensors()
        self.stacks = [
            Stack(bucket.chosen(members), memory[: shown * size], self.by_elements) for members, size in pairs
        ]

    def is_stale(self) -> bool:
        """Whether the buffer has been replaced by a larger one since: these stacks are in the old one."""
        shared = self.buffer.memory.get(self.bucket.params[0].device)
        return shared is None or self.stacks[0].scratch.data_ptr() != shared.data_ptr()

    def tables(self, first: int) -> Iterator[tuple[Any, Sequence[int]]]:
        """Tables of gradients, with the places of these among all. first: that of the bucket's first."""
        for stack, members in zip(self.stacks, self.members, strict=True):
            yield stack.first.passes.tables, [first + i for i in members]

    def take(self, setting: ParameterOptions, step: Any, first: Any) -> None:
        """Take the numbers of a step. first: those of first parts."""
        for stack in self.stacks:
            stack.take(step, first)

    def key(self) -> Hashable:
        return tuple([stack.key_of_launches() for stack in self.stacks])

    def write(self) -> None:
        for stack in self.stacks:
            stack.write()

    def figures(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter's last step, read from the device when requested."""
        pairs = zip(self.stacks, self.members, strict=True)
        stack, place = next((stack, members.index(index)) for stack, members in pairs if index in members)
        count, figures = len(stack.states), stack.figures.items()
        shown = {key: figure.reshape(count, -1, 1, 1)[place] if figure.ndim else figure for key, figure in figures}
        return {**self.rate, **shown}


class SlotStacks(NamedTuple):
    """The members of a bucket that travel in one slot."""

    members: Sequence[int]
    #: The stacks of one shape, with the places of their tensors among these members.
    stacks: Sequence[tuple[Stack, Sequence[int]]]


class OwnedLaunch(WholeLaunch):
    """One bucket of shards or replicas of a rule without factors: owners do the middle part, slot by slot."""

    def __init__(self, bucket: Bucket, slots: Mapping[int, Sequence[int]], owners: Owners, by_elements: LayOut) -> None:
        """slots: by number, the members that travel together."""
        self.owners, self.slots = owners, slots
        super().__init__(bucket, ScratchBuffer(), by_elements)

    def lay_out(self) -> None:
        """Make a stack for each shape in a slot. What is shown is sent or transformed before the next slot is shown."""
        bucket = self.bucket
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in bucket.params]
        memory = self.buffer.reserve(max(sum(sizes[i] for i in members) for members in self.slots.values()), bucket)
        places = {i: place for place, alike in enumerate(bucket.alike()) for i in alike}
        self.in_slots, self.stacks, self.members = {}, [], []
        for slot, members in self.slots.items():
            chosen = bucket.chosen(members)
            by_shape: dict[Hashable, list[int]] = defaultdict(list)
            for at, i in enumerate(members):
                by_shape[places[i], chosen.params[at].shape].append(at)
            stacks, begin = [], 0
            for positions in by_shape.values():
                scratch = memory[begin : begin + len(positions) * chosen.params[positions[0]].numel()]
                stacks.append((Stack(chosen.chosen(positions), scratch, self.by_elements), positions))
                begin += sum(sizes[members[at]] for at in positions)
                self.members.append([members[at] for at in positions])
            self.stacks += [stack for stack, _ in stacks]
            self.in_slots[slot] = SlotStacks(members, stacks)

    def is_stale(self) -> bool:
        return False

    def key(self) -> Hashable:
        return self.bucket.setting.stored_rule, super().key()

    def show(self, slot: int) -> Request:
        """Write the momentum of a slot; return what its owners are asked to do with it."""
        members, stacks = self.in_slots[slot]
        bucket, shown = self.bucket.chosen(members), list[Any](members)
        for stack, positions in stacks:
            stack.show()
            for at, x in zip(positions, stack.shown[0].unbind(), strict=True):
                shown[at] = x
        rule = cast(WholeRule, bucket.setting.stored_rule)
        return request_of(rule, bucket, [TensorList(shown)], {}, bucket.t or 0, due=True)

    def receive(self, slot: int, answer: Direction) -> None:
        """Write parameters by the directions that owners have answered with."""
        for stack, positions in self.in_slots[slot].stacks:
            figures = {key: torch.stack([values[at] for at in positions]) for key, values in answer.figures.items()}
            for key, figure in stack.rule.show_figures(xp, figures, stack.due).items():
                stack.note_figure(key, figure)
            stack.apply([answer.tensor[at] for at in positions])

    def write(self) -> None:
        """Do nothing: all was written when it arrived."""


def pick_entries(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The entries that a state has of these, under new names. names: the new one for each key."""
    return {name: state[key] for key, name in names.items() if key in state}
