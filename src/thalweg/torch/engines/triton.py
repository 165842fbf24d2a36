"""Stepping tensors on GPUs by fused kernels: buckets, their passes and gradients, and what stays from step to step."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.kernels.products.stacks import allows_tf32
from thalweg.programs.trace import PARAMETER
from thalweg.rules import Direction, WholeRule
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Asked, Part
from thalweg.storage import RECORD
from thalweg.torch.engines.memory import are_the_same
from thalweg.torch.engines.protocol import Bucket, Engine, say_buckets
from thalweg.torch.engines.recorder import ArgumentTable, on_device
from thalweg.torch.engines.shards import outline_of
from thalweg.torch.engines.squares import Squares
from thalweg.torch.engines.triton_whole import (
    LANES,
    MOST_IN_LANE,
    NUMBERED,
    OwnedLaunch,
    ScratchBuffer,
    WholeLaunch,
    count_stacks,
    count_together,
    refresh_after,
)
from thalweg.torch.params.parameter import Param
from thalweg.torch.sharding.owners import Begun, Owners, SlotWork, Team
from thalweg.torch.sharding.stages import Compute, Layout, Reduce, Stage, Statistics, take_turns

#: What a step copies to the device, and its decision.
BYTES_OF_STEP = 2**14
#: Kinds of launches that are numbered at once.
MOST_NUMBERED = 64

AnyLaunch: TypeAlias = "Launch | WholeLaunch"


class Triton(Engine):
    """The GPU engine of one optimizer, with memory that all of its steps share."""

    def __init__(self, owners: Owners) -> None:
        """owners: of the optimizer's whole tensors."""
        self.owners = owners
        #: Steps that a CUDA graph of the user's goes on using.
        self.captured: list[TritonStep] = []
        #: Of each lane.
        self.buffers = [ScratchBuffer() for _ in range(LANES)]

    def lay_out(self, buckets: Sequence[Bucket]) -> list[Layout]:
        devices = dict.fromkeys(bucket.params[0].device for bucket in buckets)
        by_device = [[bucket for bucket in buckets if bucket.params[0].device == device] for device in devices]
        return [TritonStep(self, alike).layout(alone=len(devices) == 1) for alike in by_device]

    def count_temporaries(self, params: Sequence[Param]) -> int:
        whole = [p for p in params if p.setting.rule.needs_whole]
        return BYTES_OF_STEP + sum(p.table_bytes for p in params) + count_stacks(whole)


class TritonStep:
    """Buckets laid out in tables on a GPU, in which only gradients move from step to step."""

    def __init__(self, engine: Triton, buckets: Sequence[Bucket]) -> None:
        self.engine, self.buckets, self.device = engine, buckets, buckets[0].params[0].device
        self.numerics = buckets[0].setting.numerics
        owned = [i for i, bucket in enumerate(buckets) if bucket.parts and isinstance(bucket.setting.rule, WholeRule)]
        slots = engine.owners.divide([outline_of(buckets[i]) for i in owned])
        launches: dict[int, OwnedLaunch] = {}
        for at, i in enumerate(owned):
            members = {number: slot[at] for number, (_, slot) in enumerate(slots) if at in slot}
            launches[i] = OwnedLaunch(buckets[i], members, engine.owners, Launch)
        lanes = itertools.cycle(range(1, LANES))
        self.launches = [launches.get(i) or self.launch(bucket, lanes) for i, bucket in enumerate(buckets)]
        #: In which whole tensors travel: the team, the number, and launches with something in it.
        self.slots = [(team, n, [launches[owned[at]] for at in slot]) for n, (team, slot) in enumerate(slots)]
        self.params = [p for bucket in buckets for p in bucket.params]
        self.statistics: Statistics = {
            name: functools.partial(launch.figures, i)
            for bucket, launch in zip(buckets, self.launches, strict=True)
            for i, name in enumerate(bucket.names)
        }
        self.whole = [launch for launch in self.launches if isinstance(launch, WholeLaunch)]
        #: Those of shards, whose sums other ranks complete.
        plain = [launch for launch in self.launches if isinstance(launch, Launch)]
        self.sharded = [launch for launch in plain if launch.bucket.parts]
        self.rounds: list[Iterator[list[Any]]] = []
        self.sums: list[tuple[Tensor, Any, list[Tensor]]] = []
        #: Of all gradients, in the order of the buckets; None if they are not needed here.
        self.squares: Squares | None = None
        if not any(bucket.parts for bucket in buckets) and (self.numerics.needs_norm or self.numerics.may_skip):
            self.squares = Squares([g for bucket in buckets for g in bucket.grads])
        #: Numbers of all launches, by what they depend on.
        self.numbers: dict[Hashable, int] = {}
        self.make_table()

    def make_table(self) -> None:
        """Lay out stacks that are not where or what they were, and one table of all that moves."""
        while stale := [launch for launch in self.whole if launch.is_stale()]:
            for old in stale:
                old.lay_out()
        self.counted = count_together(self.whole)
        tables, first = [], 0
        for launch, bucket in zip(self.launches, self.buckets, strict=True):
            tables += [(table, *rows_of(table, places)) for table, places in launch.tables(first)]
            first += len(bucket.names)
        if self.squares is not None:
            for table, places in zip(self.squares.tables, self.squares.members, strict=True):
                tables.append((table, places, array("Q", bytes(8 * len(places)))))
        self.table = ArgumentTable(self.device, tables, len(self.launches) + 1)
        #: What first parts of rules that need whole tensors read in place of a rate.
        self.one = self.table.rate(len(self.launches), 1.0, 1.0)
        #: Of each launch, what it was given last; and the number of all launches, None: it has to be found.
        self.given: list[tuple[Any, ...]] = [()] * len(self.launches)
        self.number: int | None = None

    def layout(self, *, alone: bool) -> Layout:
        """alone: whether no other device has launches in this step; several are not recorded, nor measured here."""
        raises, what = self.numerics.on_nonfinite == "raise", say_buckets(self.buckets)
        read = Compute(f"find {len(self.params)} gradients", self.prepare)
        step: list[Stage] = []
        rounds, writes = max(map(count_rounds, self.sharded), default=0), self.numerics.on_nonfinite == "propagate"
        for number in range(rounds):
            run = self.advance if number else self.begin
            step += [
                self.compute(f"pass {number} over shards: {what}", run, writes=writes),
                Reduce(f"sums of pass {number}", self.ask, writes=writes),
            ]
        if self.sharded:
            last = self.advance if rounds else self.begin
            step.append(self.compute(f"what follows from all sums: {what}", last, writes=not raises))
        for _, slots in itertools.groupby(self.slots, operator.itemgetter(0)):
            works = [
                SlotWork(team, *ask_owners(slot, launches), launches=True).stages() for team, slot, launches in slots
            ]
            step += take_turns(works)
        if raises:
            step.append(self.compute(f"all passes but the last, and a look at that one: {what}", self.measure))
            step.append(Compute(f"look which steps are finite: {what}", self.look))
            step.append(self.compute(f"last pass: {what}", self.write, writes=True))
        else:
            step.append(self.compute(f"all passes: {what}", self.step, writes=True))
        step.append(Compute("count the step", self.count_step, writes=True))
        squares = None if self.squares is None or not alone else self.squares.measure
        key = self.key if alone and not raises else None
        return Layout([read], step, self.statistics, self.release, squares, key)

    def compute(self, what: str, run: Callable[[], None], *, writes: bool = False) -> Stage:
        def run_here() -> None:
            with on_device(self.device):
                run()

        return Compute(what, run_here, writes=writes, launches=True)

    def launch(self, bucket: Bucket, lanes: Iterator[int]) -> AnyLaunch:
        """lanes: the next ones for small stacks."""
        if isinstance(bucket.setting.rule, WholeRule):
            lane = next(lanes) if sum(bucket.extents) <= MOST_IN_LANE else 0
            return WholeLaunch(bucket, self.engine.buffers[lane], Launch, lane)
        return Launch(bucket)

    def prepare(self) -> None:
        """Take the gradients and numbers of a step."""
        if any(launch.is_stale() for launch in self.whole) or not all(stacks.prepare() for stacks in self.counted):
            for whole in self.whole:
                whole.lay_out()
            self.make_table()
            for stacks in self.counted:
                stacks.prepare()
        for place, (launch, bucket) in enumerate(zip(self.launches, self.buckets, strict=True)):
            self.take_numbers(place, launch, bucket)
        self.table.follow(functools.reduce(operator.add, [bucket.locate_gradients() for bucket in self.buckets]))
        self.table.upload()
        if is_capturing(self.device) and self not in self.engine.captured:
            self.engine.captured.append(self)

    def take_numbers(self, place: int, launch: AnyLaunch, bucket: Bucket) -> None:
        """Give a launch the numbers of a step, where they are not those of the last."""
        from thalweg.kernels.triton.passes import Step

        lr, launch.rate = bucket.lr, bucket.rate
        is_here = isinstance(lr, Tensor) and lr.device == self.device
        rate, scale = self.table.rate(place, None if lr is None or is_here else float(lr), bucket.lr_scale)
        step = Step(lr if is_here else rate, scale, bucket.grad_scale, bucket.allowed)
        given = bucket.setting, *step
        if is_here or not are_the_same(given, self.given[place]):
            self.given[place], self.number = given, None
            launch.take(bucket.setting, step, Step(*self.one, step.grad_scale, step.allowed))

    def key(self) -> Hashable:
        """What all launches depend on beside tables."""
        due = tuple([stacks.due for stacks in self.counted])
        if self.number is None:
            if len(self.numbers) == MOST_NUMBERED:
                self.numbers.clear()
            self.number = self.numbers.setdefault(tuple([launch.key() for launch in self.launches]), next(NUMBERED))
        return self.number, due, self.table.alignment, allows_tf32() if self.whole else None

    # ---- shards: sums are completed in place

    def begin(self) -> None:
        """The first pass over shards, whatever became of the step before."""
        self.rounds, self.sums = [launch.passes.measure(launch.step) for launch in self.sharded], []
        self.advance()

    def advance(self) -> None:
        """The next pass over shards: from sums that are complete to the next ones."""
        for figures, _, tensors in self.sums:
            for x, total in zip(tensors, torch.split(figures, [x.numel() for x in tensors]), strict=True):
                x.copy_(total.view_as(x))
        together: dict[Hashable, list[Tensor]] = defaultdict(list)
        for launch, partials in zip(self.sharded, self.rounds, strict=True):
            for partial in next(partials, ()):
                together[launch.bucket.parts[0].across(partial.axes)].append(partial.tensor)
        self.sums = [
            (torch.cat([x.reshape(-1) for x in tensors]), groups, tensors) for groups, tensors in together.items()
        ]

    def ask(self) -> list[Asked]:
        return [(figures, cast(Any, groups)) for figures, groups, _ in self.sums]

    # ---- whole tensors and elements

    def measure(self) -> None:
        """All passes before writing."""
        for launch in self.launches:
            if isinstance(launch, Launch) and launch not in self.sharded:
                for _ in launch.passes.measure(launch.step):
                    pass

    def look(self) -> None:
        launches = [launch for launch in self.launches if isinstance(launch, Launch)]
        names = [name for launch in launches for name in launch.bucket.names]
        flags = torch.cat([launch.finite for launch in launches]).tolist() if launches else []
        self.buckets[0].table.nonfinite += [name for name, fine in zip(names, flags, strict=True) if not fine]

    def write(self) -> None:
        for launch in self.launches:
            if not isinstance(launch, WholeLaunch):
                launch.write()
        write_in_lanes([launch for launch in self.launches if isinstance(launch, WholeLaunch)])

    def step(self) -> None:
        self.measure()
        self.write()

    def count_step(self) -> None:
        """Do what comes after the launches of a step."""
        with on_device(self.device):
            refresh_after([stack for launch in self.whole for stack in launch.stacks])
        for stacks in self.counted:
            stacks.count_step()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version(self.params)

    def release(self, taken: bool) -> None:
        self.rounds, self.sums = [], []
        if not taken and self.slots:
            self.engine.owners.forget()


def count_rounds(launch: Launch) -> int:
    """How often the passes of shards sum something that other ranks complete."""
    passes = launch.passes
    return sum(map(bool, passes.shared[: passes.last])) + int(passes.guarded)


def ask_owners(
    slot: int, launches: Sequence[OwnedLaunch]
) -> tuple[Callable[[Team], Begun], str, Callable[[Sequence[Direction]], None]]:
    """What owners are asked for the members of a slot, and what takes their answers."""

    def begin(team: Team) -> Begun:
        return team.begin_slot([launch.show(slot) for launch in launches])

    def take(answers: Sequence[Direction]) -> None:
        for launch, answer in zip(launches, answers, strict=True):
            launch.receive(slot, answer)

    return begin, f"{sum(len(launch.in_slots[slot].members) for launch in launches)} tensors", take


def write_in_lanes(launches: Sequence[WholeLaunch]) -> None:
    """Write buckets of whole tensors; those of several lanes side by side, where a step is recorded."""
    from thalweg.kernels.triton.uploads import deferred

    by_lane: dict[int, list[WholeLaunch]] = defaultdict(list)
    for launch in launches:
        by_lane[launch.lane].append(launch)
    streams: list[Any] = [None] * len(by_lane)
    if deferred.get() is not None and len(by_lane) > 1:
        streams = [torch.cuda.Stream(launches[0].bucket.params[0].device) for _ in by_lane]  # type: ignore[no-untyped-call]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
    for stream, alike in zip(streams, by_lane.values(), strict=True):
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for launch in alike:
                launch.write()
    for stream in filter(None, streams):
        torch.cuda.current_stream().wait_stream(stream)


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


# ---- buckets


def operand_of(name: str, p: Tensor, state: Mapping[str, Tensor], keys: Sequence[str], part: Part | None) -> Any:
    from thalweg.kernels.triton.rows import Operand

    entries = tuple(state.get(key) for key in keys)
    scales = tuple(state.get(scale_key(key)) for key in (PARAMETER, *keys))
    given = name, p, entries, state["step"], scales, state.get(RECORD)
    if part is None:
        return Operand(*given)
    divided = [axis for axis, groups in enumerate(part.groups) if groups and axis > 0]
    width = math.prod(p.shape[divided[0] :]) if divided else 0
    whole_width = math.prod(part.shape[divided[0] :]) if divided else 0
    return Operand(*given, part.position, width, whole_width, part.shape)


def passes_for(bucket: Bucket) -> Any:
    """The passes of a bucket's rule over its tensors."""
    rule: Any = bucket.setting.stored_rule
    keys = tuple(rule.entries(bucket.shape))
    parts: Sequence[Part | None] = bucket.parts or [None] * len(bucket.names)
    operands = [
        operand_of(name, p, state, keys, part)
        for name, p, state, part in zip(bucket.names, bucket.params, bucket.states, parts, strict=True)
    ]
    from thalweg.kernels.triton.launching import Compiled
    from thalweg.kernels.triton.passes import Passes
    from thalweg.kernels.triton.uploads import Uploads

    memory: dict[str, Any] = dict(uploads=Uploads(bucket.params[0].device), compiled=Compiled())
    rated = bucket.lr is not None or not rule.lr_optional
    numerics = bucket.setting.numerics
    sharded = bool(bucket.parts)
    return Passes(operands, bucket.grads, rule, numerics, keys, sharded=sharded, rated=rated, **memory)


def rows_of(table: Any, places: Sequence[int]) -> tuple[list[int], array[int]]:
    """The rows of a table of gradients: of each the place of its tensor among all, and where it begins in that."""
    rows, offsets = list[int](), array("Q")
    for place, stride, slices in zip(places, table.strides, table.slices, strict=True):
        rows += [place] * slices
        offsets.extend(i * stride for i in range(slices))
    return rows, offsets


class Launch:
    """The kernels of one bucket: its passes, and where they read the numbers of a step."""

    def __init__(self, bucket: Bucket) -> None:
        # without gradients, which a copy of a bucket would keep alive
        self.passes, self.bucket = passes_for(bucket), replace(bucket, grads=())
        #: The numbers of the step, or where they are.
        self.step: Any = None
        self.rate: dict[str, Any] = {}

    @property
    def finite(self) -> Tensor:
        """For each parameter whether its step is finite, under a guard."""
        return cast(Tensor, self.passes.finite)

    def tables(self, first: int) -> Iterator[tuple[Any, Sequence[int]]]:
        """The table of gradients, with the places of these among all. first: that of the bucket's first."""
        yield self.passes.tables, range(first, first + len(self.bucket.names))

    def take(self, setting: ParameterOptions, step: Any, _: Any = None) -> None:
        """Take the numbers of a step."""
        self.passes.follow(setting.stored_rule)
        is_new, self.step = self.step is None, step
        if is_new:
            with on_device(self.passes.device):
                self.passes.prepare(step)

    def key(self) -> Hashable:
        """What its launches depend on beside tables: numbers that may be elsewhere."""
        return tuple(map(address_of, self.step))

    def write(self) -> None:
        self.passes.write(self.step)

    def figures(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter's last step, read from the device when requested."""
        slices = self.passes.tables.slices
        first = sum(slices[:index])
        stacked = self.passes.rule.stacked_axes
        stack = self.bucket.params[index].shape[:stacked]
        rows = slice(first, first + slices[index])
        stats = self.passes.stats().items()
        return {**self.rate, **{key: v[rows].reshape(stack) if stacked else v[first] for key, v in stats}}


def address_of(value: Any) -> Hashable:
    return value.data_ptr() if isinstance(value, Tensor) else value
