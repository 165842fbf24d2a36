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
from thalweg.torch.engines.memory import gradients_like, stage_shards
from thalweg.torch.engines.protocol import Bucket, CheckState, Statistics
from thalweg.torch.engines.triton_whole import KronLaunch, Room, WholeLaunch
from thalweg.torch.sharding.collectives import Computation, Question, summed

AnyLaunch: TypeAlias = "Launch | KronLaunch | WholeLaunch"


class Triton:
    """The GPU engine of one optimizer, with memory that all of its steps share."""

    def __init__(self) -> None:
        #: Runs that a CUDA graph of the user's goes on using.
        self.captured: list[TritonRun] = []
        self.kron: Any = None
        self.room = Room()

    def lay_out(self, buckets: Sequence[Bucket], check_state: CheckState) -> TritonRun:
        for bucket in buckets:
            for name, p in zip(bucket.names, bucket.params, strict=True):
                check_state(name, p, bucket.setting)
        return TritonRun(self, buckets)

    def forget(self) -> None:
        pass

    def kron_kernels(self) -> Any:
        if self.kron is None:
            from thalweg.kernels.triton.kron import KronKernels

            self.kron = KronKernels()
        return self.kron


class TritonRun:
    """Buckets laid out in tables on a GPU, in which only gradients move from step to step."""

    def __init__(self, engine: Triton, buckets: Sequence[Bucket]) -> None:
        self.engine = engine
        self.launches = [self.launch(bucket) for bucket in buckets]
        self.params = [p for bucket in buckets for p in bucket.params]
        self.statistics: Statistics = {
            name: functools.partial(launch.figures, i)
            for bucket, launch in zip(buckets, self.launches, strict=True)
            for i, name in enumerate(bucket.names)
        }
        self.is_new = True

    def launch(self, bucket: Bucket) -> AnyLaunch:
        if isinstance(bucket.setting.rule, Kron):
            return KronLaunch(self.engine.kron_kernels(), bucket)
        if isinstance(bucket.setting.rule, WholeRule):
            return WholeLaunch(bucket, self.engine.room, plain_launch)
        stepped, pairs = stage_shards(bucket) if bucket.parts else (bucket, [])
        return Launch(stepped, pairs)

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        for launch, bucket in zip(self.launches, buckets, strict=True):
            launch.prepare(bucket, gradients_of(bucket))
        if is_capturing(self.params[0].device) and self not in self.engine.captured:
            self.engine.captured.append(self)
        if self.is_new:
            self.is_new = False
            kron = [launch for launch in self.launches if isinstance(launch, KronLaunch)]
            if kron:
                self.engine.kron.prepare([launch.arguments() for launch in kron])

    def measure(self, on_nonfinite: str) -> list[Computation]:
        """All passes before writing. Without a guard they may write state."""
        return [launch.measured() for launch in self.launches]

    def nonfinite(self) -> list[str]:
        launches = [launch for launch in self.launches if isinstance(launch, Launch)]
        names = [name for launch in launches for name in launch.bucket.names]
        flags = torch.cat([launch.finite for launch in launches]).tolist() if launches else []
        return [name for name, finite in zip(names, flags, strict=True) if not finite]

    def write(self) -> Statistics:
        for launch in self.launches:
            with on_device_of(launch):
                launch.write()
        # what was saved for a backward pass is no longer what it was
        torch.autograd.graph.increment_version(self.params)
        return self.statistics

    def release(self, *, taken: bool) -> None:
        for launch in self.launches:
            launch.release()


def is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


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


def passes_for(bucket: Bucket) -> Any:
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
    return made.passes_for(operands, bucket.grads, rule, handling, keys, sharded=bool(bucket.parts), rated=rated)


def gradients_of(bucket: Bucket) -> Sequence[Tensor]:
    """Gradients with the memory layout of their parameters, contiguous for shards; copies where they differ."""
    if bucket.parts:
        return [g.resolve_neg().contiguous() for g in bucket.grads]
    return gradients_like(bucket.params, bucket.grads, all(map(Tensor.is_contiguous, bucket.params)))


def plain_launch(bucket: Bucket) -> Launch:
    """A part of another launch."""
    return Launch(bucket, [])


class Launch:
    """One bucket, with its passes."""

    step: Any = None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.passes.device
        return device

    @property
    def finite(self) -> Tensor:
        """For each parameter whether its step is finite, under a guard."""
        finite: Tensor = self.passes.finite
        return finite

    def __init__(self, bucket: Bucket, staged: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.passes = passes_for(bucket)
        #: Tensors that are not contiguous, with the copies that are stepped in their place.
        self.staged = staged
        #: Gradients are kept until all has been launched: some are copies, whose memory must not be given to others.
        self.grads: Sequence[Tensor] = ()
        self.bucket, self.is_new = bucket, True

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        from thalweg.kernels.triton.passes import Step

        for tensor, copy in self.staged:
            copy.copy_(tensor)
        self.bucket, self.grads = bucket, grads
        self.passes.tables.follow(grads)
        self.passes.follow(bucket.setting.settled)
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
        self.grads, self.step = (), None
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
