"""Buckets as fused kernels for GPUs step them: their passes, their gradients, and what stays from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thalweg.spaces.sharded import Part
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.sharding.collectives import summed
from thalweg.torch.sharding.lockstep import Computation, Question


def operand_of(name: str, p: Tensor, state: Mapping[str, Tensor], keys: Sequence[str], part: Part | None) -> Any:
    from thalweg.kernels.triton.tables import Operand

    entries = tuple(state.get(key) for key in keys)
    if part is None:
        return Operand(name, p, entries, state["step"])
    divided = [axis for axis, groups in enumerate(part.groups) if groups and axis > 0]
    width = math.prod(p.shape[divided[0] :]) if divided else 0
    whole_width = math.prod(part.shape[divided[0] :]) if divided else 0
    return Operand(name, p, entries, state["step"], part.position, width, whole_width, part.shape)


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


class KronLaunch:
    """One bucket of Kron's in one step: whole matrices of one shape, with all that happens to them."""

    bucket: Bucket

    def __init__(self, kernels: Any, memory: list[Any]) -> None:
        self.kernels, self.memory = kernels, memory
        self.stepped: Any = None
        self.params: Sequence[Tensor] = ()
        #: Whether a step like the last one was recalled, which has been looked at already.
        self.recalled = False

    @property
    def device(self) -> torch.device:
        return self.bucket.params[0].device

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        self.recalled = self.params is bucket.params
        self.bucket, self.grads, self.params = bucket, grads, bucket.params
        self.rate = bucket.rate

    def arguments(self) -> dict[str, Any]:
        bucket = self.bucket
        return dict(
            names=bucket.names,
            params=bucket.params,
            grads=self.grads,
            states=bucket.states,
            rule=bucket.setting.settled,
            handling=bucket.setting.handling,
            t=bucket.t,
        )

    def measured(self) -> Computation:
        """Ask for nothing: sharded tensors go to their owners."""
        yield from ()

    def write(self) -> None:
        bucket, given = self.bucket, self.arguments()
        given.update(lr=bucket.lr, lr_scale=bucket.lr_scale, grad_scale=bucket.grad_scale)
        self.stepped = self.kernels.step(**given, allowed=bucket.allowed, unmoved=self.recalled)

    def release(self) -> None:
        del self.grads
        self.bucket = replace(self.bucket, grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        return {**self.rate, **{key: values[index] for key, values in self.stepped.stats.items()}}


def on_device_of(launch: Any) -> AbstractContextManager[object]:
    """Triton launches on the device that is current, which may be another than the parameters'."""
    return torch.cuda.device(launch.device) if launch.device.type == "cuda" else nullcontext()
