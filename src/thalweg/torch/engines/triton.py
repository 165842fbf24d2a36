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
from thalweg.torch.engines.memory import are_the_same, gradients_like, stage_shards
from thalweg.torch.engines.protocol import Bucket, Foreseen, say_buckets
from thalweg.torch.engines.repeats import RepeatedStacks
from thalweg.torch.engines.replay import ArgumentTable, on_device
from thalweg.torch.engines.shards import outline_of
from thalweg.torch.engines.squares import Squares
from thalweg.torch.engines.triton_whole import (
    LANES,
    MOST_IN_LANE,
    OwnedLaunch,
    ScratchBuffer,
    WholeLaunch,
    count_stacks,
    refresh_after,
)
from thalweg.torch.sharding.owners import Begun, Owners, SlotWork, Team
from thalweg.torch.sharding.stages import Compute, Layout, Reduce, Stage, Statistics, take_turns

#: What a step copies to the device, and its decision.
BYTES_OF_STEP = 2**14

AnyLaunch: TypeAlias = "Launch | WholeLaunch"


class Triton:
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

    def count_temporaries(self, params: Sequence[Foreseen]) -> int:
        whole = [p for p in params if p.setting.rule.needs_whole]
        return BYTES_OF_STEP + sum(p.table_bytes for p in params) + count_stacks(whole)

    def forget(self) -> None:
        pass


class TritonStep:
    """Buckets laid out in tables on a GPU, in which only gradients move from step to step."""

    def __init__(self, engine: Triton, buckets: Sequence[Bucket]) -> None:
        self.engine, self.buckets, self.device = engine, buckets, buckets[0].params[0].device
        self.handling = buckets[0].setting.handling
        owned = [i for i, bucket in enumerate(buckets) if bucket.parts and isinstance(bucket.setting.rule, WholeRule)]
        slots = engine.owners.divide([outline_of(buckets[i]) for i in owned])
        launches: dict[int, OwnedLaunch] = {}
        for at, i in enumerate(owned):
            members = {number: slot[at] for number, (_, slot) in enumerate(slots) if at in slot}
            launches[i] = OwnedLaunch(buckets[i], members, engine.owners, plain_launch)
        lanes = itertools.cycle(range(1, LANES))
        self.launches = [launches.get(i) or self.launch(bucket, lanes) for i, bucket in enumerate(buckets)]
        #: In which whole tensors travel: the team, the number, and launches with something in it.
        self.slots = [(team, n, [launches[owned[at]] for at in slot]) for n, (team, slot) in enumerate(slots)]
        for launch, bucket in zip(self.launches, buckets, strict=True):
            if isinstance(launch, WholeLaunch) and launch.is_stale():
                launch.lay_out(bucket)
        self.params = [p for bucket in buckets for p in bucket.params]
        self.contiguous = [all(map(Tensor.is_contiguous, bucket.params)) for bucket in buckets]
        #: Whether gradients are read where they are, if they are stored like these.
        self.in_place = [
            are_the_same(gradients_of(bucket, contiguous), bucket.grads)
            for bucket, contiguous in zip(buckets, self.contiguous, strict=True)
        ]
        self.statistics: Statistics = {
            name: functools.partial(launch.figures, i)
            for bucket, launch in zip(buckets, self.launches, strict=True)
            for i, name in enumerate(bucket.names)
        }
        self.sharded = any(bucket.parts for bucket in buckets)
        whole = [launch for launch in self.launches if isinstance(launch, WholeLaunch)]
        plain = [launch for launch in self.launches if isinstance(launch, Launch)]
        #: Of shards; those that sum up ask for what they have summed, one after the other.
        self.sharded = [launch for launch in plain if launch.bucket.parts]
        self.rounds: list[Iterator[list[Any]]] = []
        self.sums: list[tuple[Tensor, Any, list[Tensor]]] = []
        parts = [part for launch in cast(Any, [*plain, *whole]) for part in launch.parts()]
        tables = [part.passes.tables for part in parts if part.moves]
        #: Of all gradients, in the order of the buckets; None if they are not needed here.
        self.squares: Squares | None = None
        if not any(bucket.parts for bucket in buckets) and (self.handling.needs_norm or self.handling.may_skip):
            self.squares = Squares([g for bucket in buckets for g in bucket.grads])
            tables += self.squares.tables
        self.moving = ArgumentTable(self.device, tables, len(parts))
        for place, part in enumerate(parts):
            part.moving = self.moving, place
        #: Launches of whole tensors, which are prepared together where they repeat, and their places.
        self.repeats = RepeatedStacks(whole, self.moving) if whole else None
        self.whole = [i for i, launch in enumerate(self.launches) if isinstance(launch, WholeLaunch)]

    def layout(self, *, alone: bool) -> Layout:
        """alone: whether no other device has launches in this step; several are not recorded, nor measured here."""
        raises, what = self.handling.on_nonfinite == "raise", say_buckets(self.buckets)
        read = Compute(f"find the gradients of {what}", self.prepare)
        step: list[Stage] = []
        for number in range(max(map(count_rounds, self.sharded), default=0)):
            step += [
                self.compute(f"pass {number} over shards: {what}", self.advance, writes=not raises),
                Reduce(f"sums of pass {number}: {what}", self.ask, writes=not raises),
            ]
        if self.sharded:
            step.append(self.compute(f"what follows from all sums: {what}", self.advance, writes=not raises))
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
            return WholeLaunch(bucket, self.engine.buffers[lane], plain_launch, lane)
        stepped, pairs = stage_shards(bucket) if bucket.parts else (bucket, [])
        return Launch(stepped, pairs)

    def prepare(self) -> None:
        """Take the gradients and numbers of a step."""
        whole, repeated = [self.buckets[i] for i in self.whole], list[int]()
        if self.repeats is not None and all(self.in_place) and self.repeats.prepare(whole):
            repeated = self.whole
        for i, (launch, bucket) in enumerate(zip(self.launches, self.buckets, strict=True)):
            if i not in repeated:
                places = bucket.addresses if self.in_place[i] else None
                grads = bucket.grads if places is not None else gradients_of(bucket, self.contiguous[i])
                launch.prepare(bucket, grads, places)
        if self.repeats is not None and not self.repeats.together:
            self.repeats.note(whole)
        if self.squares is not None:
            self.squares.follow(self.find_gradients())
        self.moving.upload()
        if is_capturing(self.device) and self not in self.engine.captured:
            self.engine.captured.append(self)

    def find_gradients(self) -> array[int]:
        """Where the gradients are."""
        places = array("Q")
        for launch, bucket, in_place in zip(self.launches, self.buckets, self.in_place, strict=True):
            known = bucket.addresses if in_place else None
            places.extend(map(Tensor.data_ptr, launch.grads) if known is None else known)
        return places

    def key(self) -> Hashable:
        """What all launches depend on beside tables."""
        others = [launch.key() for launch in self.launches if isinstance(launch, Launch)]
        together = None if self.repeats is None else (self.repeats.key(), allows_tf32())
        return tuple(others), together, None if self.squares is None else self.squares.key()

    # ---- shards: sums are completed in place

    def advance(self) -> None:
        """The next pass over shards: from sums that are complete to the next ones."""
        for figures, _, tensors in self.sums:
            for x, total in zip(tensors, figures.split([x.numel() for x in tensors]), strict=True):
                x.copy_(total.view_as(x))
        rounds = self.rounds or [launch.passes.measure(launch.step) for launch in self.sharded]
        together: dict[Hashable, list[Tensor]] = defaultdict(list)
        for launch, partials in zip(self.sharded, rounds, strict=True):
            for partial in next(partials, ()):
                together[launch.bucket.parts[0].across(partial.axes)].append(partial.tensor)
        self.sums = [
            (torch.cat([x.reshape(-1) for x in tensors]), groups, tensors) for groups, tensors in together.items()
        ]
        self.rounds = rounds if together else []

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
        with on_device(self.device):
            refresh_after([stack for i in self.whole for stack in cast(WholeLaunch, self.launches[i]).stacks])
        if self.repeats is not None:
            self.repeats.count_step()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version(self.params)

    def release(self, taken: bool) -> None:
        self.rounds, self.sums = [], []
        if not taken and self.slots:
            self.engine.owners.forget()
        for launch in self.launches:
            launch.release()


def count_rounds(launch: Launch) -> int:
    """How often the passes of shards sum something that other ranks complete."""
    passes = launch.passes
    return sum(map(bool, passes.sums[: passes.last])) + passes.guarded


def ask_owners(
    slot: int, launches: Sequence[OwnedLaunch]
) -> tuple[Callable[[Team], Begun], str, Callable[[Sequence[Direction]], None]]:
    """What owners are asked for the members of a slot, and what takes their answers."""

    def begin(team: Team) -> Begun:
        return team.begin_slot([launch.show(slot) for launch in launches])

    def take(answers: Sequence[Direction]) -> None:
        for launch, answer in zip(launches, answers, strict=True):
            launch.take(slot, answer)

    return begin, f"{sum(len(launch.in_slots[slot].members) for launch in launches)} tensors", take


def write_in_lanes(launches: Sequence[WholeLaunch]) -> None:
    """Write buckets of whole tensors; those of several lanes side by side, where a step is recorded."""
    from thalweg.kernels.triton.uploads import deferred

    by_lane: dict[int, list[WholeLaunch]] = defaultdict(list)
    for launch in launches:
        by_lane[launch.lane].append(launch)
    streams: list[Any] = [None] * len(by_lane)
    if deferred.get() is not None and len(by_lane) > 1:
        streams = [torch.cuda.Stream(launches[0].device) for _ in by_lane]  # type: ignore[no-untyped-call]
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
    handling = bucket.setting.handling
    sharded = bool(bucket.parts)
    return Passes(operands, bucket.grads, rule, handling, keys, sharded=sharded, rated=rated, **memory)


def gradients_of(bucket: Bucket, contiguous: bool) -> Sequence[Tensor]:
    """Gradients that lie as their parameters do, contiguous for shards; copies where they differ."""
    if bucket.parts:
        return [g.resolve_neg().contiguous() for g in bucket.grads]
    return gradients_like(bucket.params, bucket.grads, contiguous)


def plain_launch(bucket: Bucket) -> Launch:
    """The launch of a part of another launch."""
    return Launch(bucket, [])


class Launch:
    """The kernels of one bucket: its passes, and where they read the numbers of a step."""

    #: The numbers of the step, and where they are or what they are.
    step: Any = None
    step_places: tuple[Hashable, ...] = ()
    #: Whether its gradients are others from step to step.
    moves = True
    #: What copies addresses and rates to the device, and the place of its rate there; None: each launch has its own.
    moving: tuple[ArgumentTable, int] | None = None

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.passes.device)

    @property
    def finite(self) -> Tensor:
        """For each parameter whether its step is finite, under a guard."""
        return cast(Tensor, self.passes.finite)

    def __init__(self, bucket: Bucket, staged: Sequence[tuple[Tensor, Tensor]]) -> None:
        from thalweg.kernels.triton.passes import Step

        self.passes, self.new_step = passes_for(bucket), Step
        #: Tensors that are not contiguous, with the copies that are stepped in their place.
        self.staged = staged
        #: Gradients are kept until all has been launched: some are copies, whose memory must not be given to others.
        self.grads: Sequence[Tensor] = ()
        self.is_new = True
        self.bucket = bucket

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor], places: array[int] | None = None) -> None:
        """Take a step's gradients and numbers."""
        for tensor, copy in self.staged:
            copy.copy_(tensor)
        self.rate = bucket.rate
        self.follow(bucket.setting, grads, places, **bucket.given)

    def follow(
        self,
        setting: ParameterOptions,
        grads: Sequence[Tensor] | None,
        places: array[int] | None = None,
        *,
        lr: Any,
        lr_scale: float = 1.0,
        grad_scale: Tensor | None = None,
        allowed: Tensor | None = None,
    ) -> None:
        """Note what kernels are to read.

        grads: None if they come when it is time to write. places: where they are, if that is known.
        """
        if grads is not None:
            self.grads = grads
            self.passes.tables.follow(grads, places)
        self.passes.follow(setting.stored_rule)
        scale: Any = lr_scale
        is_own = isinstance(lr, Tensor) and lr.device == self.passes.device
        if lr is not None and not is_own:
            lr = float(lr)
        if self.moving is not None:
            moving, place = self.moving
            rate, scale = moving.rate(place, None if is_own else lr, scale)
            lr = lr if is_own else rate
        step = self.new_step(lr, scale, grad_scale, allowed)
        if is_own or self.step is None or not are_the_same(step, self.step):
            self.step, self.step_places = step, tuple(map(address_of, step))
        if self.is_new:
            self.is_new = False
            with on_device(self.device):
                self.passes.prepare(self.step)

    def parts(self) -> list[Launch]:
        return [self]

    def key(self) -> Hashable:
        """What its launches depend on beside tables: how gradients are read, and tensors that may be others."""
        return self.passes.tables.grads_aligned, self.step_places

    def write(self) -> None:
        self.passes.write(self.step)
        for tensor, copy in self.staged:
            tensor.copy_(copy)

    def release(self) -> None:
        """Let go of gradients."""
        self.grads = ()

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
