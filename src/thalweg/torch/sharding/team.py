"""Ranks that share sharded parameters: which rank owns which parameter, and the messages between them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.rules.noise import normal, tensor_id
from thalweg.spaces import torch as xp
from thalweg.torch.sharding.factors import Block, factor_shapes
from thalweg.torch.sharding.owner_kernels import Whitener, room_for_factors
from thalweg.torch.sharding.requests import Answer, Task, Work
from thalweg.torch.sharding.shards import MeshGroup


class Team:
    def __init__(self, groups: tuple[MeshGroup, ...], whitener: Whitener) -> None:
        self.whitener = whitener
        self.group = group_over(groups[0].mesh, sorted({group.dimension for group in groups}))
        self.device = groups[0].device
        self.size = torch.distributed.get_world_size(self.group)
        self.rank = torch.distributed.get_rank(self.group)
        #: By name, then by rank: the block of the parameter, and those of its factors.
        self.blocks: dict[str, list[dict[str, Block]]] = {}
        self.owners: dict[str, int] = {}
        #: The whole factors of what this rank owns; for kernels as they are stored, with their norms.
        self.whole: dict[str, State[Tensor]] = {}
        #: Parameters whose owners have their whole factors, and whether for kernels; the same on every rank.
        self.known: dict[str, bool] = {}

    def learn(self, tasks: Sequence[Task]) -> None:
        """Exchange layouts between ranks once, and choose owners: the most work first, to the rank with the least."""
        everyone: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyone, {task.name: task.blocks() for task in tasks}, group=self.group)
        self.blocks = {task.name: [theirs[task.name] for theirs in everyone] for task in tasks}
        load = [0.0] * self.size
        for task in sorted(tasks, key=lambda task: (-task.cost, task.name)):
            owner = min(range(self.size), key=lambda rank: (load[rank], rank))
            self.owners[task.name] = owner
            load[owner] += task.cost
        self.known.clear()
        self.whole.clear()

    def whitened(self, tasks: Sequence[Task]) -> list[Answer]:
        """Send shards to their owners, whiten the tensors that this rank owns, send the results back."""
        if any(task.name not in self.blocks for task in tasks):
            self.learn(tasks)
        # factors that their owner does not have as a whole travel with the gradients
        cold = {task.name for task in tasks if not task.remembered or self.known.get(task.name) != task.by_kernels}
        # free received messages before sending results
        done = self.worked(tasks, self.gathered(tasks, cold), cold)
        for task in tasks:
            if task.remembered:
                self.known[task.name] = task.by_kernels
            else:
                self.known.pop(task.name, None)
        returned = self.exchanged(
            tasks,
            [
                [x for task in self.mine(tasks) for x in self.answer_for(task, done[task.name], rank)]
                for rank in range(self.size)
            ],
            [
                sum(math.prod(shape) for task in self.owned(tasks, owner) for shape in self.answer_shapes(task))
                for owner in range(self.size)
            ],
        )
        readers = [Reader(message) for message in returned]
        return [self.answer(task, readers[self.owners[task.name]]) for task in tasks]

    def gathered(self, tasks: Sequence[Task], cold: set[str]) -> list[Reader]:
        """Receive from every rank its shards of the tensors that this rank owns."""
        received = self.exchanged(
            tasks,
            [[x for task in self.owned(tasks, owner) for x in sent(task, cold)] for owner in range(self.size)],
            [
                sum(block.size for task in self.mine(tasks) for block in self.due_from(task, rank, cold))
                for rank in range(self.size)
            ],
        )
        return [Reader(message) for message in received]

    def owned(self, tasks: Sequence[Task], owner: int) -> Iterator[Task]:
        return (task for task in tasks if self.owners[task.name] == owner)

    def mine(self, tasks: Sequence[Task]) -> Iterator[Task]:
        return self.owned(tasks, self.rank)

    def due_from(self, task: Task, rank: int, cold: set[str]) -> Iterator[Block]:
        """The pieces that a rank sends to an owner, in order."""
        blocks = self.blocks[task.name][rank]
        yield from [blocks["p"]] * len(task.shown)
        if task.name in cold:
            yield from (blocks[key] for key in task.matrices)

    def worked(self, tasks: Sequence[Task], readers: list[Reader], cold: set[str]) -> dict[str, Answer]:
        """Assemble and whiten the tensors that this rank owns. Readers are empty afterwards."""

        def put_together(task: Task, key: str, whole: Tensor) -> Tensor:
            for reader, blocks in zip(readers, self.blocks[task.name], strict=True):
                blocks[key].of(whole).copy_(reader.next(blocks[key].shape))
            return whole

        done: dict[str, Answer] = {}
        for_kernels = []
        for task in self.mine(tasks):
            room = partial(torch.empty, dtype=task.dtype, device=task.shown[0].device)
            shown = [put_together(task, "p", room(task.part.shape)) for _ in task.shown]
            shapes = factor_shapes(task.rule, task.part.shape)
            if task.by_kernels:
                if task.name in cold:
                    whole = self.room_for_factors(task, shapes)
                    for key in task.matrices:
                        put_together(task, key, whole[key])
                    for key in task.norms:
                        whole[key].copy_(task.factors[key])
                for_kernels.append(Work(task, shown, self.whole[task.name]))
                continue
            if task.name in cold:
                self.whole[task.name] = {key: put_together(task, key, room(shapes[key])) for key in task.matrices}
            known = {**self.whole[task.name], **{key: task.factors[key] for key in task.norms}}
            done[task.name] = task.rule.whitened(
                xp, shown[0], shown[-1], known, task.due, partial(noise_of, task, shown[0])
            )
            if not task.remembered:
                del self.whole[task.name]
            elif task.due:
                self.whole[task.name] = {
                    key: as_stored(task, done[task.name][2][key], self.whole[task.name][key]) for key in task.matrices
                }
        readers.clear()  # kernels have all tensors at once: do not keep a second copy
        return {**done, **self.whitener.whitened(for_kernels)}

    def room_for_factors(self, task: Task, shapes: Mapping[str, Shape]) -> State[Tensor]:
        """Buffers for kernels, which write in place: the same at every step, so that their tables stay valid."""
        if task.name not in self.whole or self.known.get(task.name) is False:
            norms = {key: task.factors[key] for key in task.norms}
            self.whole[task.name] = room_for_factors(shapes, norms, task.stored, task.shown[0].device)
        return self.whole[task.name]

    def answer_for(self, task: Task, whole: Answer, rank: int) -> Iterator[Tensor]:
        """The pieces that an owner sends back to a rank."""
        h, h_square, factors = whole
        blocks = self.blocks[task.name][rank]
        yield blocks["p"].of(h)
        yield h_square
        if task.due:
            yield from (blocks[key].of(factors[key]) for key in task.matrices)
            yield from (factors[key] for key in task.norms)

    def answer_shapes(self, task: Task) -> list[Shape]:
        """The shapes of the pieces that this rank receives, in the order in which they are sent."""
        blocks, rule, shape = self.blocks[task.name][self.rank], task.rule, task.part.shape
        # one mean of squares for each slice, with as many axes as there are factors
        shapes = [blocks["p"].shape, (math.prod(shape[: rule.stacked_axes]), *[1] * len(rule.sizes(shape)))]
        if task.due:
            shapes += [blocks[key].shape for key in task.matrices]
            shapes += [tuple(task.factors[key].shape) for key in task.norms]
        return shapes

    def answer(self, task: Task, reader: Reader) -> Answer:
        h, h_square, *rest = (reader.next(shape).to(task.dtype) for shape in self.answer_shapes(task))
        keys = [*task.matrices, *task.norms]
        return h, h_square, dict(zip(keys, rest, strict=True)) if task.due else {key: task.factors[key] for key in keys}

    def exchanged(
        self, tasks: Sequence[Task], outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int]
    ) -> list[Tensor]:
        """One all-to-all: takes the message for each rank, returns the message from each."""
        dtype = max((task.dtype for task in tasks), key=lambda dtype: torch.finfo(dtype).bits)
        device = tasks[0].shown[0].device
        nothing = torch.empty(0, dtype=dtype, device=device)
        flat = [torch.cat([nothing, *(piece.reshape(-1).to(dtype) for piece in pieces)]) for pieces in outgoing]
        arrived = torch.empty(sum(incoming), dtype=dtype, device=self.device)
        sizes = [piece.numel() for piece in flat]
        message = torch.cat(flat).to(self.device)
        torch.distributed.all_to_all_single(arrived, message, list(incoming), sizes, group=self.group)
        return list(torch.split(arrived.to(device), list(incoming)))


class Reader:
    """A flat message, read piece by piece."""

    def __init__(self, message: Tensor) -> None:
        self.message, self.place = message, 0

    def next(self, shape: Shape) -> Tensor:
        begin, self.place = self.place, self.place + math.prod(shape)
        return self.message[begin : self.place].reshape(shape)


def sent(task: Task, cold: set[str]) -> list[Tensor]:
    """The pieces that this rank sends to the owner of a parameter."""
    return [*task.shown, *([task.factors[key] for key in task.matrices] if task.name in cold else [])]


def noise_of(task: Task, x: Tensor) -> Tensor:
    """The same random numbers as one process would have."""
    made: Tensor = normal(xp, x, seed=task.seed, tensor=tensor_id(task.name), t=task.t)
    return made


def as_stored(task: Task, factor: Tensor, old: Tensor) -> Tensor:
    """A factor as it will be found in the state at the next step: rounded, or the old one if that overflows."""
    rounded = factor.to(task.stored).to(task.dtype)
    overflows = task.stored == torch.float16 and not bool(torch.isfinite(rounded).all())
    return old if overflows else rounded


def group_over(mesh: Any, dimensions: Sequence[int]) -> Any:
    """The ranks that differ from this one in these dimensions of a mesh."""
    if len(dimensions) == 1:
        return mesh.get_group(dimensions[0])
    here = mesh.get_coordinate()
    place = tuple(slice(None) if axis in dimensions else here[axis] for axis in range(mesh.ndim))
    ranks = mesh.mesh[place].flatten().tolist()
    if len(ranks) == torch.distributed.get_world_size():
        return torch.distributed.group.WORLD
    return torch.distributed.new_group(ranks, use_local_synchronization=True)
