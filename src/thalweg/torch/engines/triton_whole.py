"""Rules that need whole tensors on GPUs: fused kernels for what goes element by element, products between them.

Tensors of one shape are one stack. What is shown of them is written into memory that all buckets share. Kron has
kernels of its own for all of it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from thalweg.codecs import scale_key
from thalweg.kernels.chunks import WHOLE_CHUNK, pieces
from thalweg.programs.parts import SHOWN, first_part, last_part, own_key
from thalweg.programs.trace import PARAMETER
from thalweg.rules import Direction, WholeRule
from thalweg.rules.around import keys_around
from thalweg.settings import Handling, Setting
from thalweg.spaces.foreach import TensorList
from thalweg.storage import RECORD
from thalweg.torch.engines.memory import stage_shards
from thalweg.torch.engines.protocol import Bucket
from thalweg.torch.engines.results import request_of
from thalweg.torch.sharding.collectives import Computation, Question
from thalweg.torch.sharding.owners import Owners
from thalweg.torch.wholes import space_of_kernels

#: Lays out the kernels of a rule that is stepped element by element, for a bucket.
LayOut: TypeAlias = Callable[[Bucket], Any]


class Room:
    """Memory for what is shown, as much as the largest stack needs."""

    def __init__(self, most: int = WHOLE_CHUNK) -> None:
        """most: elements of a stack."""
        self.most = most
        self.memory: dict[torch.device, Tensor] = {}

    def of(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        wanted = count * torch.empty((), dtype=dtype).element_size()
        if device not in self.memory or self.memory[device].numel() < wanted:
            self.memory[device] = torch.empty(wanted, dtype=torch.uint8, device=device)
        return self.memory[device][:wanted].view(dtype)


class Stack:
    """Some tensors of one shape, with the kernels of both parts."""

    def __init__(self, bucket: Bucket, room: Room, by_elements: LayOut) -> None:
        setting, rule = bucket.setting, cast(WholeRule, bucket.setting.stored_rule)
        count, shape, device = len(bucket.params), tuple(bucket.params[0].shape), bucket.params[0].device
        self.key, self.around = own_key(rule, shape), keys_around(rule, shape)
        dtype = getattr(torch, rule.whole_dtype("float32"))
        self.room = room.of(count * bucket.params[0].numel(), dtype, device)
        self.shown = self.room.view(count, *shape)
        self.figures: dict[str, Tensor] = {}
        self.settle(setting)
        self.first_bucket, self.last_bucket = self.for_first(bucket), self.for_last(bucket)
        self.first, self.last = by_elements(self.first_bucket), by_elements(self.last_bucket)
        self.last.moves = False  # it reads what the middle part has left
        self.first_bucket = self.first_bucket.renewed(grads=())  # which must not be kept alive after the step

    def settle(self, setting: Setting) -> None:
        """Take the options of a step."""
        rule = cast(WholeRule, setting.stored_rule)
        self.setting, self.whole = setting, replace(rule, stacked_axes=rule.stacked_axes + 1)
        # the step is counted by the last part, which has the parameter: the options of steps are for one part each
        handling = Handling(maximize=setting.handling.maximize)
        self.first_setting = replace(setting, rule=first_part(rule), handling=handling)
        handling = Handling(rounding=setting.handling.rounding, seed=setting.handling.seed)
        self.last_setting = replace(setting, rule=last_part(rule), handling=handling)

    def for_first(self, bucket: Bucket) -> Bucket:
        states = [
            {SHOWN: x, "step": s["step"], **pick_entries(s, {scale_key(self.key): scale_key(PARAMETER)})}
            for x, s in zip(self.shown.unbind(), bucket.states, strict=True)
        ]
        kept = [s[self.key] for s in bucket.states]
        return replace(bucket, params=kept, states=states, setting=self.first_setting, lr=1.0, lr_scale=1.0)

    def for_last(self, bucket: Bucket) -> Bucket:
        beside = {key: key for key in (RECORD, *self.around)}
        states = [{"step": s["step"], **pick_entries(s, beside)} for s in bucket.states]
        return replace(bucket, grads=self.shown.unbind(), states=states, setting=self.last_setting, grad_scale=None)

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor], places: array[int] | None) -> None:
        if bucket.setting is not self.setting:
            self.settle(bucket.setting)
        now: dict[str, Any] = dict(grad_scale=bucket.grad_scale, allowed=bucket.allowed)
        self.first.prepare(self.first_bucket.renewed(setting=self.first_setting, **now), grads, places)
        now = dict(lr=bucket.lr, lr_scale=bucket.lr_scale, allowed=bucket.allowed)
        self.last.prepare(self.last_bucket.renewed(setting=self.last_setting, **now), None)

    def write(self) -> None:
        self.show()
        made = self.whole.transform(space_of_kernels(), (self.shown,), {})
        self.figures = made.figures
        self.apply(made.tensor.contiguous().unbind())

    def show(self) -> None:
        from thalweg.kernels.triton.stages import WRITE

        passes = self.first.passes
        passes.go(self.first.step, passes.last, WRITE)

    def apply(self, tensors: Sequence[Tensor]) -> None:
        self.last.passes.tables.follow(tensors)
        self.last.write()  # launches are in order: what the next stack allocates may lie where these tensors were

    def release(self) -> None:
        self.first.release()
        self.last.release()


class WholeLaunch:
    """One bucket of a rule that needs whole tensors."""

    def __init__(self, bucket: Bucket, room: Room, by_elements: LayOut) -> None:
        self.room, self.by_elements = room, by_elements
        self.stacks: list[Stack] = []
        self.bucket, self.grads = bucket, cast(Sequence[Tensor], ())
        self.lay_out(bucket)

    def lay_out(self, bucket: Bucket) -> None:
        self.members: list[Sequence[int]] = list(pieces(bucket.extents, self.room.most))
        self.stacks = [Stack(bucket.chosen(own), self.room, self.by_elements) for own in self.members]

    def is_stale(self) -> bool:
        """Whether another bucket needed more memory for what is shown, and this one is to follow."""
        shared = self.room.memory.get(self.device)
        return any(shared is None or stack.room.data_ptr() != shared.data_ptr() for stack in self.stacks)

    @property
    def device(self) -> torch.device:
        return self.bucket.params[0].device

    def parts(self) -> list[Any]:
        return [part for stack in self.stacks for part in (stack.first, stack.last)]

    def key(self) -> Hashable:
        return tuple((id(stack), stack.first.key(), stack.last.key()) for stack in self.stacks)

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor], places: array[int] | None) -> None:
        self.bucket, self.grads, self.rate = bucket, grads, bucket.rate
        if self.is_stale():
            self.lay_out(bucket)
        for stack, own in zip(self.stacks, self.members, strict=True):
            known = None if places is None else array("Q", [places[i] for i in own])
            stack.prepare(bucket, [grads[i] for i in own], known)

    def measure(self) -> Computation:
        """Ask for nothing: sharded tensors go to their owners."""
        yield from ()

    def write(self) -> None:
        for stack in self.stacks:
            stack.write()

    def release(self) -> None:
        self.grads = ()
        for stack in self.stacks:
            stack.release()
        self.bucket = self.bucket.renewed(grads=(), grad_scale=None, allowed=None)

    def figures(self, index: int) -> dict[str, Any]:
        """The statistics of a parameter's last step, read from the device when requested."""
        for stack in self.stacks:
            count = len(stack.shown)
            if index < count:
                return {**self.rate, **{key: own.reshape(count, -1, 1, 1)[index] for key, own in stack.figures.items()}}
            index -= count
        raise IndexError(index)


class OwnedLaunch(WholeLaunch):
    """One bucket of shards, on which owners do the middle part."""

    def __init__(self, bucket: Bucket, owners: Owners, by_elements: LayOut) -> None:
        self.owners, self.answer = owners, Direction([], {}, {})
        super().__init__(bucket, Room(), by_elements)

    def lay_out(self, bucket: Bucket) -> None:
        """Make a stack for each shape of shards, with memory of its own: all travel together."""
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, p in enumerate(bucket.params):
            alike[p.shape].append(i)
        staged, self.staged = stage_shards(bucket)
        self.members = [*alike.values()]
        self.stacks = [Stack(staged.chosen(own), Room(), self.by_elements) for own in self.members]

    def is_stale(self) -> bool:
        return False

    def measure(self) -> Computation:
        """Write momentum, and ask owners for the direction."""
        for tensor, copy in self.staged:
            copy.copy_(tensor)
        shown: list[Any] = [None] * len(self.bucket.names)
        for stack, own in zip(self.stacks, self.members, strict=True):
            stack.show()
            for i, x in zip(own, stack.shown.unbind(), strict=True):
                shown[i] = x
        rule = cast(WholeRule, self.bucket.setting.stored_rule)
        (self.answer,) = yield Question(
            self.owners.make, [request_of(rule, self.bucket, [TensorList(shown)], {}, 0, due=True)]
        )

    def write(self) -> None:
        for stack, own in zip(self.stacks, self.members, strict=True):
            stack.apply([self.answer.tensor[i] for i in own])
        for tensor, copy in self.staged:
            tensor.copy_(copy)

    def release(self) -> None:
        self.answer = self.answer._replace(tensor=[])
        super().release()

    def figures(self, index: int) -> dict[str, Any]:
        return {**self.rate, **{key: own[index] for key, own in self.answer.figures.items()}}


def pick_entries(state: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Some of a state, where it has them, under other names."""
    return {own: state[key] for key, own in names.items() if key in state}


def arguments_of(bucket: Bucket, grads: Sequence[Tensor]) -> dict[str, Any]:
    """What Kron's kernels take of a bucket."""
    return dict(
        names=bucket.names,
        params=bucket.params,
        grads=grads,
        states=bucket.states,
        rule=bucket.setting.stored_rule,
        handling=bucket.setting.handling,
        t=bucket.t,
    )


class KronLaunch:
    """One bucket of Kron's: whole matrices of one shape, with all that happens to them."""

    #: What copies addresses and numbers to the device; None: this launch does.
    moving: Any = None

    def __init__(self, kernels: Any, bucket: Bucket) -> None:
        self.kernels, self.device = kernels, bucket.params[0].device
        self.grads: Sequence[Tensor] = ()
        given = bucket.names, bucket.params, bucket.grads, bucket.states
        self.batch = kernels.batch(*given, bucket.setting.stored_rule, bucket.setting.handling)
        self.prepared: Any = None

    def prepare(self, bucket: Bucket, grads: Sequence[Tensor], places: array[int] | None) -> None:
        self.grads, self.rate = grads, bucket.rate
        self.prepared = self.kernels.prepare_step(
            **arguments_of(bucket, grads),
            lr=bucket.lr,
            lr_scale=bucket.lr_scale,
            grad_scale=bucket.grad_scale,
            allowed=bucket.allowed,
            batch=self.batch,
            moving=self.moving,
            places=places,
        )

    def key(self) -> Hashable:
        key: Hashable = self.prepared.key()
        return key

    def measure(self) -> Computation:
        """Ask for nothing: sharded tensors go to their owners."""
        yield from ()

    def write(self) -> None:
        self.prepared.launch()

    def release(self) -> None:
        self.grads = ()

    def figures(self, index: int) -> dict[str, Any]:
        stats = self.prepared.outcome().stats
        return {**self.rate, **{key: values[index] for key, values in stats.items()}}
