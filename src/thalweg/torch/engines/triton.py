"""Stepping tensors on GPUs by fused kernels: buckets, their passes and gradients, and what stays from step to step."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.kernels.products.stacks import allows_tf32
from thalweg.programs.trace import PARAMETER
from thalweg.rules import WholeRule
from thalweg.settings import ParameterOptions
from thalweg.spaces.sharded import Part
from thalweg.storage import RECORD
from thalweg.torch.engines.memory import are_the_same, gradients_like, held_in, stage_shards
from thalweg.torch.engines.protocol import Bucket, Decision, Foreseen, Statistics
from thalweg.torch.engines.repeats import RepeatedStacks
from thalweg.torch.engines.replay import ArgumentTable, Launches, Recorded, Replay
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
    step_slot,
)
from thalweg.torch.sharding.collectives import Computation, Question, summed
from thalweg.torch.sharding.owners import MessageCall, Owners, in_turn

#: What a step copies to the device, and its decision.
BYTES_OF_STEP = 2**14

AnyLaunch: TypeAlias = "Launch | WholeLaunch"


class Triton:
    """The GPU engine of one optimizer, with memory that all of its steps share."""

    def __init__(self, owners: Owners) -> None:
        """owners: of the optimizer's whole tensors."""
        self.owners = owners
        #: Runs that a CUDA graph of the user's goes on using.
        self.captured: list[TritonRun] = []
        #: Of each lane.
        self.buffers = [ScratchBuffer() for _ in range(LANES)]

    def lay_out(self, buckets: Sequence[Bucket]) -> TritonRun:
        return TritonRun(self, buckets)

    def count_temporaries(self, params: Sequence[Foreseen]) -> int:
        whole = [p for p in params if p.setting.rule.needs_whole]
        return BYTES_OF_STEP + sum(p.table_bytes for p in params) + count_stacks(whole)

    def forget(self) -> None:
        pass


class TritonRun:
    """Buckets laid out in tables on a GPU, in which only gradients move from step to step."""

    def __init__(self, engine: Triton, buckets: Sequence[Bucket]) -> None:
        self.engine = engine
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
        devices = {launch.device for launch in self.launches}
        self.moving: ArgumentTable | None = None
        #: Of all gradients, in the order of the buckets; None if they are not needed here.
        self.squares: Squares | None = None
        #: Launches of whole tensors, which are prepared together where they repeat, and their places.
        self.repeats: RepeatedStacks | None = None
        self.whole = [i for i, launch in enumerate(self.launches) if isinstance(launch, WholeLaunch)]
        self.replay: Replay | None = None
        #: The launches of a step, where no user is asked on the way; None: each bucket goes by itself.
        self.rounds: Launches | None = None
        if len(devices) == 1:
            (device,) = devices
            whole = [launch for launch in self.launches if isinstance(launch, WholeLaunch)]
            plain = [launch for launch in self.launches if isinstance(launch, Launch)]
            parts = [part for launch in cast(Any, [*plain, *whole]) for part in launch.parts()]
            tables = [part.passes.tables for part in parts if part.moves]
            handling = buckets[0].setting.handling
            if not self.sharded and (handling.needs_norm or handling.may_skip):
                self.squares = Squares([g for bucket in buckets for g in bucket.grads])
                tables += self.squares.tables
            self.moving = ArgumentTable(device, tables, len(parts))
            for place, part in enumerate(parts):
                part.moving = self.moving, place
            if whole:
                self.repeats = RepeatedStacks(whole, self.moving)
            self.replay = Replay(device)
        self.measures_gradients = self.squares is not None
        #: What a GradScaler decides, where recorded steps find it; or what decides when the gradients are measured.
        self.scale: Tensor | None = None
        self.allowed: Tensor | None = None
        self.decision: Decision | None = None

    @property
    def recorded(self) -> int:
        return 0 if self.replay is None else sum(isinstance(known, Recorded) for known in self.replay.known.values())

    def launch(self, bucket: Bucket, lanes: Iterator[int]) -> AnyLaunch:
        """lanes: the next ones for small stacks."""
        if isinstance(bucket.setting.rule, WholeRule):
            lane = next(lanes) if sum(bucket.extents) <= MOST_IN_LANE else 0
            return WholeLaunch(bucket, self.engine.buffers[lane], plain_launch, lane)
        stepped, pairs = stage_shards(bucket) if bucket.parts else (bucket, [])
        return Launch(stepped, pairs)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        scale, allowed = buckets[0].grad_scale, buckets[0].allowed
        self.decision = buckets[0].decision
        if self.decision is None and self.moving is not None and (scale is not None or allowed is not None):
            self.scale, self.allowed = held_in(self.scale, scale), held_in(self.allowed, allowed)
            buckets = [bucket.renewed(grad_scale=self.scale, allowed=self.allowed) for bucket in buckets]
        whole, repeated = [buckets[i] for i in self.whole], list[int]()
        if self.repeats is not None and all(self.in_place) and self.repeats.prepare(whole):
            repeated = self.whole
        for i, (launch, bucket) in enumerate(zip(self.launches, buckets, strict=True)):
            if i not in repeated:
                places = bucket.addresses if self.in_place[i] else None
                grads = bucket.grads if places is not None else gradients_of(bucket, self.contiguous[i])
                launch.prepare(bucket, grads, places)
        if self.repeats is not None and not self.repeats.together:
            self.repeats.note(whole)
        if self.decision is not None:
            self.follow_gradients(buckets)
        if self.moving is not None:
            self.moving.upload()
        capturing = is_capturing(self.params[0].device)
        if capturing and self not in self.engine.captured:
            self.engine.captured.append(self)

    def follow_gradients(self, buckets: Sequence[Bucket]) -> None:
        """Note where the gradients are whose squares are to be found."""
        places = array("Q")
        for launch, bucket, in_place in zip(self.launches, buckets, self.in_place, strict=True):
            known = bucket.addresses if in_place else None
            places.extend(map(Tensor.data_ptr, launch.grads) if known is None else known)
        assert self.squares is not None
        self.squares.follow(places)

    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All passes before writing, unless nothing is asked between them. Without a guard they may write state."""
        if self.replay is None or on_nonfinite == "raise":
            return [self.ask_owners(), *(launch.measure() for launch in self.launches)]
        self.rounds = self.replay.run(self.launch_all, self.key())
        return [self.ask()] if self.sharded else []

    def ask(self) -> Computation:
        """Go on until all is measured; sums are completed in place."""
        assert self.rounds is not None
        while True:
            with on_device(self.launches[0].device):
                between = next(self.rounds)
                if between is None:
                    return
                if callable(between):
                    between()
                    continue
            whole = yield Question(summed, between)
            for (figures, _), total in zip(between, whole, strict=True):
                if total is not figures:
                    figures.copy_(total)

    def nonfinite(self) -> list[str]:
        launches = [launch for launch in self.launches if isinstance(launch, Launch)]
        names = [name for launch in launches for name in launch.bucket.names]
        flags = torch.cat([launch.finite for launch in launches]).tolist() if launches else []
        return [name for name, finite in zip(names, flags, strict=True) if not finite]

    def write(self) -> Statistics:
        if self.rounds is not None:
            with on_device(self.launches[0].device):
                for _ in self.rounds:
                    pass
        else:
            for launch in self.launches:
                with on_device(launch.device):
                    launch.write()
        whole = [cast(WholeLaunch, self.launches[i]) for i in self.whole]
        for device in dict.fromkeys(launch.device for launch in whole):
            with on_device(device):
                refresh_after([stack for launch in whole if launch.device == device for stack in launch.stacks])
        if self.repeats is not None:
            self.repeats.count_step()
        else:
            for launch in whole:
                launch.count_step()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version(self.params)
        return self.statistics

    def key(self) -> Hashable:
        """What all launches depend on beside tables."""
        others = [launch.key() for launch in self.launches if isinstance(launch, Launch)]
        decided = None
        if self.decision is not None and self.squares is not None:
            decided = self.decision.key(), self.squares.key()
        together = None if self.repeats is None else (self.repeats.key(), allows_tf32())
        return tuple(others), together, decided

    def launch_all(self) -> Launches:
        sharded = [launch for launch in self.launches if isinstance(launch, Launch) and launch.bucket.parts]
        rounds = [(launch.bucket.parts[0], launch.passes.measure(launch.step)) for launch in sharded]
        while sums := [(part, partial) for part, partials in rounds for partial in next(partials, ())]:
            yield from complete(sums)
        yield from self.step_owned()
        yield None
        if self.decision is not None and self.squares is not None:
            self.decision.take(self.squares.measure())
            self.decision.commit()
        for launch in self.launches:
            if launch not in sharded:
                for _ in launch.measure():
                    pass
            if not isinstance(launch, WholeLaunch):
                launch.write()
        write_in_lanes([launch for launch in self.launches if isinstance(launch, WholeLaunch)])

    def step_owned(self) -> Iterator[MessageCall]:
        """Step whole tensors slot by slot; yields calls that send messages, or wait for them."""
        for _, slots in itertools.groupby(self.slots, operator.itemgetter(0)):
            yield from in_turn([step_slot(*slot) for slot in slots])

    def ask_owners(self) -> Computation:
        """Step whole tensors slot by slot, and send their messages."""
        for send in self.step_owned():
            send()
        yield from ()

    def release(self, *, taken: bool) -> None:
        self.rounds = None
        if not taken and self.slots:
            self.engine.owners.forget()
        for launch in self.launches:
            launch.release()


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


def complete(sums: Sequence[tuple[Part, Any]]) -> Launches:
    """Ask for the sums of several launches: those that go over the same ranks as one figure."""
    together: dict[Hashable, list[Tensor]] = defaultdict(list)
    for part, partial in sums:
        together[part.across(partial.axes)].append(partial.tensor)
    asked: list[Any] = [(torch.cat([x.reshape(-1) for x in tensors]), groups) for groups, tensors in together.items()]
    yield asked
    for (figures, _), tensors in zip(asked, together.values(), strict=True):
        for x, total in zip(tensors, figures.split([x.numel() for x in tensors]), strict=True):
            x.copy_(total.view_as(x))


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
        #: The bucket between steps.
        self.bucket = self.idle = bucket.renewed(grads=(), grad_scale=None, allowed=None)

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor], places: array[int] | None = None) -> None:
        """Take a step's gradients and numbers."""
        for tensor, copy in self.staged:
            copy.copy_(tensor)
        self.bucket, self.rate = bucket, bucket.rate
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

    def measure(self) -> Computation:
        """Run all passes before writing; yield the sums to complete over ranks, if the bucket is sharded."""
        parts, rounds = self.bucket.parts, self.passes.measure(self.step)
        while (sums := self.after(rounds)) is not None:
            if parts:
                whole = yield Question(summed, [(partial.tensor, parts[0].across(partial.axes)) for partial in sums])
                for partial, total in zip(sums, whole, strict=True):
                    partial.tensor.copy_(total)

    def after(self, rounds: Iterator[list[Any]]) -> list[Any] | None:
        with on_device(self.device):
            return next(rounds, None)

    def write(self) -> None:
        self.passes.write(self.step)
        for tensor, copy in self.staged:
            tensor.copy_(copy)

    def release(self) -> None:
        """Let go of gradients."""
        self.grads, self.bucket = (), self.idle

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


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the device that is current, which may be another than the parameters'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)
