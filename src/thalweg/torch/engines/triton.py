"""Stepping tensors on GPUs by fused kernels: buckets, their passes and gradients, and what stays from step to step."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.programs.trace import PARAMETER
from thalweg.rules import Kron, WholeRule
from thalweg.spaces.sharded import Part
from thalweg.storage import RECORD
from thalweg.torch.engines.protocol import Bucket, CheckState, Statistics
from thalweg.torch.engines.triton_whole import KronLaunch, Room, WholeLaunch
from thalweg.torch.sharding.collectives import Computation, Question, summed

AnyLaunch: TypeAlias = "Launch | KronLaunch | WholeLaunch"
#: In how many lists each parameter may be kept with its tables. In most trainings it is always in the same.
MOST_LISTS = 8


class Triton:
    """The GPU engine of one optimizer, with tables that are kept between steps."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, ...], AnyLaunch] = {}
        self.launches: list[AnyLaunch] = []
        self.latest: list[AnyLaunch] = []
        #: Those that a CUDA graph goes on using.
        self.captured: list[AnyLaunch] = []
        self.kron: Any = None
        self.room = Room()
        self.names: set[str] = set()
        self.statistics: Statistics = {}

    @torch.compiler.disable
    def prepare(self, buckets: Sequence[Bucket], check_state: CheckState) -> None:
        """Lay out a step of these buckets; nothing is written yet. State that is new is checked."""
        self.launches = []
        for bucket in buckets:
            grads = gradients_of(bucket)
            launch = self.launch(bucket, grads, check_state)
            launch.prepare(bucket, grads)
            self.launches.append(launch)
        if self.launches and is_capturing(self.launches[0].device):
            self.captured += [launch for launch in self.launches if launch not in self.captured]
        if self.launches != self.latest:
            self.latest = list(self.launches)
            for launch in self.launches:
                own = {name: functools.partial(launch.figures, i) for i, name in enumerate(launch.bucket.names)}
                self.statistics.update(own)
            if self.kron is not None:
                self.kron.prepare([launch.arguments() for launch in self.launches if isinstance(launch, KronLaunch)])

    def launch(self, bucket: Bucket, grads: Sequence[Tensor], check_state: CheckState) -> AnyLaunch:
        """As it was at the last step, if nothing has moved but gradients."""
        names = tuple(bucket.names)
        known = self.known.get(names)
        alike = known is not None and known.memory[0] is bucket.setting and known.memory[-1] == (bucket.lr is None)
        if known is not None and alike and known.bucket.params is bucket.params:
            return known  # a step that was recalled: it has been looked at already
        memory = memory_of(bucket, grads)
        if known is not None and known.memory[1:] == memory[1:]:
            known.memory = memory
            return known
        for name, p in zip(bucket.names, bucket.params, strict=True):
            check_state(name, p, bucket.setting)
        made: AnyLaunch
        if isinstance(bucket.setting.rule, Kron):
            if self.kron is None:
                from thalweg.kernels.triton.kron import KronKernels

                self.kron = KronKernels()
            made = KronLaunch(self.kron, memory)
        elif isinstance(bucket.setting.rule, WholeRule):
            made = WholeLaunch(bucket, grads, memory, self.room, plain_launch)
        else:
            stepped, pairs = staged(bucket) if bucket.parts else (bucket, [])
            made = Launch(passes_for(stepped, grads), memory, pairs)
        self.known[names] = made
        self.names.update(names)
        while sum(map(len, self.known)) > MOST_LISTS * len(self.names):
            del self.known[next(iter(self.known))]
        return made

    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All passes before writing. Without a guard they may write state."""
        return [launch.measured() for launch in self.launches]

    @torch.compiler.disable
    def nonfinite(self) -> list[str]:
        launches = [launch for launch in self.launches if isinstance(launch, Launch)]
        names = [name for launch in launches for name in launch.bucket.names]
        flags = torch.cat([launch.finite for launch in launches]).tolist() if launches else []
        return [name for name, finite in zip(names, flags, strict=True) if not finite]

    @torch.compiler.disable
    def write(self) -> Statistics:
        for launch in self.launches:
            with on_device_of(launch):
                launch.write()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version([p for launch in self.launches for p in launch.bucket.params])
        return self.statistics

    def release(self, *, taken: bool) -> None:
        for launch in self.launches:
            launch.release()
        self.launches = []


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def memory_of(bucket: Bucket, grads: Sequence[Tensor]) -> list[Any]:
    """What passes depend on: options, and where everything is that stays from step to step."""
    tensors = [
        (p.data_ptr(), p.dtype, *[(entry.data_ptr(), entry.dtype) for entry in s.values()])
        for p, s in zip(bucket.params, bucket.states, strict=True)
    ]
    parts = [(part.shape, part.offset) for part in bucket.parts]
    handling, rule = bucket.setting.handling, bucket.setting.rule
    return [bucket.setting, rule, handling, grads[0].dtype, parts, tensors, bucket.lr is None]


# ---- buckets


def operand_of(name: str, p: Tensor, state: Mapping[str, Tensor], keys: Sequence[str], part: Part | None) -> Any:
    from thalweg.kernels.triton.tables import Operand

    entries = tuple(state.get(key) for key in keys)
    scales = tuple(state.get(scale_key(key)) for key in (PARAMETER, *keys))
    given = name, p, entries, state["step"], scales, state.get(RECORD)
    if part is None:
        return Operand(*given)
    divided = [axis for axis, groups in enumerate(part.groups) if groups and axis > 0]
    width = math.prod(p.shape[divided[0] :]) if divided else 0
    whole_width = math.prod(part.shape[divided[0] :]) if divided else 0
    return Operand(*given, part.position, width, whole_width, part.shape)


def passes_for(bucket: Bucket, grads: Sequence[Tensor]) -> Any:
    """The passes of a bucket's rule over its tensors."""
    rule: Any = bucket.setting.settled
    keys = tuple(rule.entries(bucket.shape))
    parts: Sequence[Part | None] = bucket.parts or [None] * len(bucket.names)
    operands = [
        operand_of(name, p, state, keys, part)
        for name, p, state, part in zip(bucket.names, bucket.params, bucket.states, parts, strict=True)
    ]
    from thalweg.kernels.triton import derived_tiles as made

    rated = bucket.lr is not None or not rule.lr_optional
    handling = bucket.setting.handling
    return made.passes_for(operands, grads, rule, handling, keys, sharded=bool(bucket.parts), rated=rated)


def gradients_of(bucket: Bucket) -> Sequence[Tensor]:
    """Gradients with the memory layout of their parameters, contiguous for shards; copies where they differ."""
    params, grads = bucket.params, bucket.grads
    if not all(map(Tensor.is_contiguous, (*params, *grads))) or any(map(Tensor.is_neg, grads)):
        pairs = zip(params, grads, strict=True)
        return [g.resolve_neg().contiguous() if bucket.parts else alike(p, g) for p, g in pairs]
    return grads


def alike(p: Tensor, g: Tensor) -> Tensor:
    if g.stride() != p.stride() or g.is_neg():
        return torch.empty_like(p, dtype=g.dtype).copy_(g)
    return g


def staged(bucket: Bucket) -> tuple[Bucket, list[tuple[Tensor, Tensor]]]:
    """A bucket of shards with copies in place of those that are not contiguous, and which those are."""
    pairs = []

    def contiguous(x: Tensor) -> Tensor:
        if x.is_contiguous():
            return x
        pairs.append((x, x.contiguous()))
        return pairs[-1][1]

    params = [contiguous(p) for p in bucket.params]
    states = [{key: contiguous(entry) for key, entry in state.items()} for state in bucket.states]
    return replace(bucket, params=params, states=states), pairs


def plain_launch(bucket: Bucket, grads: Sequence[Tensor]) -> Launch:
    """A part of another launch, which has looked at what lies where."""
    return Launch(passes_for(bucket, grads), [], [])


class Launch:
    """One bucket, with its passes, in one step."""

    bucket: Bucket

    @property
    def device(self) -> torch.device:
        device: torch.device = self.passes.device
        return device

    @property
    def finite(self) -> Tensor:
        """For each parameter whether its step is finite, under a guard."""
        finite: Tensor = self.passes.finite
        return finite

    def __init__(self, passes: Any, memory: list[Any], staged: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.passes, self.memory = passes, memory
        #: Tensors that are not contiguous, with the copies that are stepped in their place.
        self.staged = staged
        self.is_new = True

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton.passes import Step

        for tensor, copy in self.staged:
            copy.copy_(tensor)
        #: Gradients are kept until all has been launched: some are copies, whose memory must not be given to others.
        self.bucket, self.grads = bucket, grads
        self.passes.tables.follow(grads)
        lr = bucket.lr
        if isinstance(lr, Tensor) and lr.device != self.passes.device:
            lr = float(lr)
        self.step = Step(lr, bucket.lr_scale, bucket.grad_scale, bucket.allowed)
        if self.is_new:
            self.is_new = False
            with on_device_of(self):
                self.passes.prepare(self.step)
        self.rate = bucket.rate

    def measured(self) -> Computation:
        """Run all passes before writing; yield the sums to complete over ranks, if the bucket is sharded."""
        parts, rounds = self.bucket.parts, self.passes.measured(self.step)
        while (sums := self.after(rounds)) is not None:
            if parts:
                whole = yield Question(summed, [(each.tensor, parts[0].across(each.axes)) for each in sums])
                for each, total in zip(sums, whole, strict=True):
                    each.tensor.copy_(total)

    def after(self, rounds: Iterator[list[Any]]) -> list[Any] | None:
        with on_device_of(self):
            return next(rounds, None)

    def write(self) -> None:
        self.passes.write(self.step)
        for tensor, copy in self.staged:
            tensor.copy_(copy)

    def release(self) -> None:
        """Let go of gradients, and of what one step alone has."""
        del self.grads, self.step
        self.bucket = replace(self.bucket, grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter's last step, read from the device when requested."""
        slices = self.passes.tables.slices
        first = sum(slices[:index])
        stacked = self.passes.rule.stacked_axes
        stack = self.bucket.params[index].shape[:stacked]
        own = slice(first, first + slices[index])
        stats = self.passes.stats().items()
        return {**self.rate, **{key: v[own].reshape(stack) if stacked else v[first] for key, v in stats}}


def on_device_of(launch: AnyLaunch) -> AbstractContextManager[object]:
    """Triton launches on the device that is current, which may be another than the parameters'."""
    return torch.cuda.device(launch.device) if launch.device.type == "cuda" else nullcontext()
