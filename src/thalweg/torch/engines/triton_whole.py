"""Rules that need whole tensors on GPUs: fused kernels for what goes element by element, library products between them.

Tensors of one shape are one stack. What is shown of them is written into memory that all buckets share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from thalweg.kernels.chunks import WHOLE_CHUNK
from thalweg.programs.parted import SHOWN, first_part, last_part
from thalweg.rules import WholeRule
from thalweg.settings import Handling
from thalweg.spaces import torch as xp
from thalweg.torch.engines.bucket import Bucket
from thalweg.torch.engines.triton_buckets import Launch, passes_for
from thalweg.torch.sharding.lockstep import Computation


class Room:
    """Memory for what is shown, as much as the largest stack needs."""

    def __init__(self) -> None:
        self.memory: dict[torch.device, Tensor] = {}

    def of(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        wanted = count * torch.empty((), dtype=dtype).element_size()
        if device not in self.memory or self.memory[device].numel() < wanted:
            self.memory[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
        return self.memory[device][:wanted].view(dtype)


class Stack:
    """Some tensors of one shape, with the kernels of both parts."""

    def __init__(self, bucket: Bucket, grads: Sequence[Tensor], room: Room) -> None:
        setting, rule = bucket.setting, cast(WholeRule, bucket.setting.settled)
        count, shape, device = len(bucket.params), tuple(bucket.params[0].shape), bucket.params[0].device
        (self.key,) = rule.entries(shape)
        dtype = getattr(torch, rule.dtype_shown("float32"))
        self.room = room.of(count * bucket.params[0].numel(), dtype, device)
        self.shown = self.room.view(count, *shape)
        self.whole = replace(rule, stacked_axes=rule.stacked_axes + 1)
        self.figures: dict[str, Tensor] = {}
        # the step is counted by the last part, which has the parameter: the options of steps are for one part each
        handling = Handling(maximize=setting.handling.maximize)
        self.first_setting = replace(setting, rule=first_part(rule), handling=handling)
        handling = Handling(rounding=setting.handling.rounding, seed=setting.handling.seed)
        self.last_setting = replace(setting, rule=last_part(rule), handling=handling)
        self.first = Launch(passes_for(self.for_first(bucket), grads), [], [])
        self.last = Launch(passes_for(self.for_last(bucket, self.shown.unbind()), self.shown.unbind()), [], [])

    def for_first(self, bucket: Bucket) -> Bucket:
        states = [{SHOWN: x, "step": s["step"]} for x, s in zip(self.shown.unbind(), bucket.states, strict=True)]
        kept = [s[self.key] for s in bucket.states]
        return replace(bucket, params=kept, states=states, setting=self.first_setting, lr=1.0, lr_scale=1.0)

    def for_last(self, bucket: Bucket, made: Sequence[Tensor]) -> Bucket:
        states = [{"step": s["step"]} for s in bucket.states]
        return replace(bucket, grads=made, states=states, setting=self.last_setting, grad_scale=None)

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        self.first.prepare(self.for_first(bucket), grads)
        self.last.prepare(self.for_last(bucket, self.shown.unbind()), self.shown.unbind())

    def write(self) -> None:
        from thalweg.kernels.triton.passes import WRITE

        passes = self.first.passes
        passes.go(self.first.step, passes.last, WRITE)
        made = self.whole.made(xp, (self.shown,), {})
        self.figures = made.figures
        tensors = made.tensor.contiguous().unbind()
        self.last.grads = tensors  # kept until all has been launched
        self.last.passes.tables.follow(tensors)
        self.last.write()

    def release(self) -> None:
        self.first.release()
        self.last.release()


class WholeLaunch:
    """One bucket of a rule that needs whole tensors, in one step."""

    bucket: Bucket

    def __init__(self, bucket: Bucket, grads: Sequence[Tensor], memory: list[Any], room: Room) -> None:
        self.memory, self.room = memory, room
        self.stacks: list[Stack] = []
        self.lay_out(bucket, grads)

    def lay_out(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        self.stacks = [Stack(chunk, chunk.grads, self.room) for chunk in chunks_of(bucket, grads)]

    @property
    def device(self) -> torch.device:
        return self.bucket.params[0].device

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor]) -> None:
        self.bucket, self.grads, self.rate = bucket, grads, bucket.rate
        shared = self.room.memory.get(bucket.params[0].device)
        if any(shared is None or stack.room.data_ptr() != shared.data_ptr() for stack in self.stacks):
            self.lay_out(bucket, grads)  # another bucket needed more
        for stack, chunk in zip(self.stacks, chunks_of(bucket, grads), strict=True):
            stack.prepare(chunk, chunk.grads)

    def measured(self) -> Computation:
        """Ask for nothing: sharded tensors go to their owners."""
        yield from ()

    def write(self) -> None:
        for stack in self.stacks:
            stack.write()

    def release(self) -> None:
        del self.grads
        for stack in self.stacks:
            stack.release()
        self.bucket = replace(self.bucket, grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter's last step, read from the device when requested."""
        for stack in self.stacks:
            count = len(stack.shown)
            if index < count:
                return {**self.rate, **{key: own.reshape(count, -1, 1, 1)[index] for key, own in stack.figures.items()}}
            index -= count
        raise IndexError(index)


def chunks_of(bucket: Bucket, grads: Sequence[Tensor]) -> list[Bucket]:
    chunks: list[Bucket] = replace(bucket, grads=grads).chunks(WHOLE_CHUNK)
    return chunks
