"""Rules that need whole tensors, on sharded or replicated parameters: each tensor has an owner, which transforms it.

Within the owner's replica, what the rule shows travels to the owners in one message, and what they made of it travels
back in another. Then one message tells all other replicas. A rank keeps its part of every factor, so that checkpoints
can be laid out anew, and the whole factors of the sharded tensors that it owns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.rules import Direction, Kron
from thalweg.rules.whole import SLOT, owners_of, slots_of
from thalweg.spaces import torch as xp
from thalweg.torch.sharding import collectives
from thalweg.torch.sharding.layouts import Block, factor_shapes
from thalweg.torch.sharding.messages import Format, Reader, answer_size, pack, unpack
from thalweg.torch.sharding.requests import Request
from thalweg.torch.sharding.shards import MeshGroup
from thalweg.torch.wholes import draw_noise, transform_lists


class Owners:
    """The teams of ranks over which one optimizer's parameters are sharded or replicated."""

    def __init__(self, codes: str | None = None, slot: int = SLOT) -> None:
        """codes: those in which tensors travel; None: in the dtype of the rule's products. slot: elements at a time."""
        self.codes, self.slot = codes, slot
        self.teams: dict[tuple[tuple[MeshGroup, ...], ...], Team] = {}
        self.whitening = OwnerWhitening()

    def forget(self) -> None:
        """Drop whole factors, because state was loaded or dropped; the next step gathers them again."""
        for team in self.teams.values():
            team.known.clear()
            team.whole.clear()

    def make(self, requests: Sequence[Request]) -> list[Direction]:
        """For each request this rank's shard of the tensor that was made, and this rank's rows of its factors."""
        together: dict[tuple[tuple[MeshGroup, ...], ...], list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            # the same ranks, whichever axis of a parameter they shard
            shards = sorted(request.part.across(None), key=lambda group: group.order)
            together[tuple(shards), request.part.replicas].append(index)
        answers: list[Any] = [None] * len(requests)
        for ranks, members in together.items():
            if ranks not in self.teams:
                self.teams[ranks] = Team(Ranks(ranks[0]), Ranks(ranks[1]), self)
            found = self.teams[ranks].make([requests[i] for i in members])
            for i, answer in zip(members, found, strict=True):
                answers[i] = answer
        return answers


class Ranks:
    """Ranks that send messages to one another, as one of them sees them; it may be alone."""

    def __init__(self, groups: tuple[MeshGroup, ...]) -> None:
        self.size, self.rank = 1, 0
        if groups:
            self.group = collectives.group_over(groups[0].mesh, sorted({group.dimension for group in groups}))
            self.device = groups[0].device
            self.size = torch.distributed.get_world_size(self.group)
            self.rank = torch.distributed.get_rank(self.group)

    def gather(self, own: Any) -> list[Any]:
        return collectives.gather_objects(own, self.group) if self.size > 1 else [own]

    def exchange(
        self, outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], form: Format, device: torch.device
    ) -> collectives.Exchange:
        """One message to every rank, and one from each."""
        return collectives.Exchange(
            outgoing, incoming, dtype=form.dtype, device=device, group=self.group, sent_from=self.device
        )


class Team:
    """The ranks over which some parameters are sharded, and their replicas that divide the work."""

    def __init__(self, shards: Ranks, replicas: Ranks, owners: Owners) -> None:
        self.shards, self.replicas = shards, replicas
        self.codes, self.slot, self.whitening = owners.codes, owners.slot, owners.whitening
        #: By name, then by rank: the block of the parameter, and those of its factors.
        self.blocks: dict[str, list[dict[str, Block]]] = {}
        #: The replica, and the rank in it, that transforms a parameter.
        self.owners: dict[str, tuple[int, int]] = {}
        #: The whole factors of what this rank owns; for kernels as they are stored, with their norms.
        self.whole: dict[str, State[Tensor]] = {}
        #: Parameters whose owners have their whole factors, and whether for kernels; the same on every rank.
        self.known: dict[str, bool] = {}

    def learn(self, requests: Sequence[Request]) -> None:
        """Exchange layouts between ranks once, and choose owners."""
        everyone = self.shards.gather({request.name: request.blocks() for request in requests})
        self.blocks = {request.name: [theirs[request.name] for theirs in everyone] for request in requests}
        costs = [(request.name, request.cost) for request in requests]
        self.owners = dict(zip(self.blocks, owners_of(costs, self.shards.size, self.replicas.size), strict=True))
        self.known.clear()
        self.whole.clear()

    def make(self, requests: Sequence[Request]) -> list[Direction]:
        """What was made of each request, wherever its owner is.

        Tensors travel in slots: while one is transformed, the next arrives and those before it leave.
        """
        if any(request.name not in self.blocks for request in requests):
            self.learn(requests)
        form = Format.of(requests, self.codes)
        sizes = [(self.owners[request.name], math.prod(request.part.shape)) for request in requests]
        # kernels have tables of all that they are given
        at_once = any(request.by_kernels for request in requests)
        slots = [list(range(len(requests)))] if at_once else slots_of(sizes, self.slot)
        made: dict[str, Direction] = {}
        in_turn([self.make_slot([requests[i] for i in members], form, made) for members in slots])
        return [made[request.name] for request in requests]

    def make_slot(self, requests: Sequence[Request], form: Format, made: dict[str, Direction]) -> Iterator[None]:
        """Send shards to their owners, transform what this rank owns, send it back, and tell other replicas.

        Yields whenever a message has been sent. What this replica does not own arrives from those that do.
        """
        device = requests[0].tensors[0].device
        own = [request for request in requests if self.owners[request.name][0] == self.replicas.rank]
        # factors that their owner does not have as a whole travel with the gradients
        cold = {
            request.name
            for request in own
            if not request.remembered or self.known.get(request.name) != request.by_kernels
        }
        arriving = self.send_shards(own, cold, form, device) if own and self.shards.size > 1 else None
        yield
        # free received messages before sending results
        done = self.work(own, [] if arriving is None else self.read(arriving, form), cold)
        for request in own:
            if request.remembered:
                self.known[request.name] = request.by_kernels
            else:
                self.known.pop(request.name, None)
        if arriving is not None:
            arriving = self.send_back(own, done, form, device)
            yield
            readers = self.read(arriving, form)
            done = {request.name: self.answer(request, readers[self.owners[request.name][1]]) for request in own}
        else:
            yield
        if self.replicas.size > 1:
            sizes = [0] * self.replicas.size
            for request in requests:
                sizes[self.owners[request.name][0]] += self.answer_size(request, form)
            pieces = [piece for request in own for piece in pack(request, done[request.name], form)]
            telling = self.replicas.exchange([pieces] * self.replicas.size, sizes, form, device)
            yield
            readers = self.read(telling, form)
            done = {request.name: self.answer(request, readers[self.owners[request.name][0]]) for request in requests}
        made.update(done)

    def send_shards(
        self, requests: Sequence[Request], cold: set[str], form: Format, device: torch.device
    ) -> collectives.Exchange:
        """Send this rank's shards to their owners; shards of what it owns arrive from every rank."""
        outgoing: list[list[Tensor]] = [[] for _ in range(self.shards.size)]
        incoming = [0] * self.shards.size
        for request in requests:
            factors = request.matrices if request.name in cold else []
            outgoing[self.owners[request.name][1]] += map(form.write, request.tensors)
            outgoing[self.owners[request.name][1]] += [request.factors[key] for key in factors]
            for rank, blocks in enumerate(self.blocks[request.name]) if self.is_mine(request) else ():
                incoming[rank] += form.count(blocks["p"].size) * len(request.tensors)
                incoming[rank] += sum(blocks[key].size for key in factors)
        return self.shards.exchange(outgoing, incoming, form, device)

    def send_back(
        self, requests: Sequence[Request], done: Mapping[str, Direction], form: Format, device: torch.device
    ) -> collectives.Exchange:
        """Send every rank its part of what this one has made; parts of what others have made arrive."""
        outgoing = [
            [
                piece
                for request in self.mine(requests)
                for piece in pack(request, cut(done[request.name], self.blocks[request.name][rank]), form)
            ]
            for rank in range(self.shards.size)
        ]
        sizes = [0] * self.shards.size
        for request in requests:
            sizes[self.owners[request.name][1]] += self.answer_size(request, form)
        return self.shards.exchange(outgoing, sizes, form, device)

    def read(self, exchange: collectives.Exchange, form: Format) -> list[Reader]:
        return [Reader(message, form) for message in exchange.wait()]

    def is_mine(self, request: Request) -> bool:
        return self.owners[request.name] == (self.replicas.rank, self.shards.rank)

    def mine(self, requests: Sequence[Request]) -> Iterator[Request]:
        return filter(self.is_mine, requests)

    def work(self, requests: Sequence[Request], readers: list[Reader], cold: set[str]) -> dict[str, Direction]:
        """Assemble the tensors that this rank owns, and do the work on them. Readers are empty afterwards."""

        def put_together(request: Request, key: str, whole: Tensor) -> Tensor:
            for reader, blocks in zip(readers, self.blocks[request.name], strict=True):
                read = reader.next_tensor if key == "p" else reader.next
                blocks[key].of(whole).copy_(read(blocks[key].shape))
            return whole

        done: dict[str, Direction] = {}
        for_kernels = []
        stacks: dict[Any, list[tuple[str, list[Tensor]]]] = defaultdict(list)
        for request in self.mine(requests):
            room = partial(torch.empty, dtype=request.dtype, device=request.tensors[0].device)
            tensors = list(request.tensors)
            if readers:
                tensors = [put_together(request, "p", room(request.part.shape)) for _ in tensors]
            if request.is_stackable:
                stacks[request.rule, request.part.shape, request.dtype].append((request.name, tensors))
                continue
            shapes = factor_shapes(request.rule, request.part.shape)
            if request.by_kernels:
                if request.name in cold:
                    whole = self.room_for_factors(request, shapes)
                    for key in request.factors:
                        if readers and key in request.matrices:
                            put_together(request, key, whole[key])
                        else:
                            whole[key].copy_(request.factors[key])
                for_kernels.append(Assembled(request, tensors, self.whole[request.name]))
                continue
            if readers and request.name in cold:
                self.whole[request.name] = {
                    key: put_together(request, key, room(shapes[key])) for key in request.matrices
                }
            known = {**request.factors, **self.whole.get(request.name, {})}
            done[request.name] = request.rule.transform(
                xp, tuple(tensors), known, due=request.due, noise=partial(noise_of, request, tensors[0])
            )
            if not request.remembered:
                self.whole.pop(request.name, None)
            elif request.changes:
                self.whole[request.name] = {
                    key: as_stored(request, done[request.name].state[key], self.whole[request.name][key])
                    for key in request.matrices
                }
        readers.clear()  # kernels and stacks have all tensors at once: do not keep a second copy
        for (rule, *_), members in stacks.items():
            names, lists = zip(*members, strict=True)
            members.clear()
            done.update(zip(names, transform_lists(rule, list(zip(*lists, strict=True))), strict=True))
        return {**done, **self.whitening.whiten(for_kernels)}

    def room_for_factors(self, request: Request, shapes: Mapping[str, Shape]) -> State[Tensor]:
        """Buffers for kernels, which write in place: the same at every step, so that their tables stay valid."""
        if request.name not in self.whole or self.known.get(request.name) is False:
            device = request.tensors[0].device
            factors = {key: torch.empty(shape, dtype=request.stored, device=device) for key, shape in shapes.items()}
            norms = {key: torch.empty_like(request.factors[key], device=device) for key in request.norms}
            self.whole[request.name] = {**factors, **norms}
        return self.whole[request.name]

    def shapes_here(self, request: Request) -> list[Shape]:
        """Of this rank's shards of the parameter and of its factors."""
        blocks = self.blocks[request.name][self.shards.rank]
        return [blocks[key].shape for key in ("p", *request.matrices)]

    def answer_size(self, request: Request, form: Format) -> int:
        return answer_size(request, self.shapes_here(request), form)

    def answer(self, request: Request, reader: Reader) -> Direction:
        return unpack(request, reader, self.shapes_here(request))


def in_turn(slots: Sequence[Iterator[None]]) -> None:
    """Advance each slot to its next message before those that began earlier; all ranks in the same order."""
    running: list[Iterator[None]] = []
    waiting = list(reversed(slots))
    while running or waiting:
        running = [*([waiting.pop()] if waiting else []), *running]
        running = [each for each in running if next(each, DONE) is not DONE]


#: What a slot yields after its last message.
DONE = object()


def cut(whole: Direction, blocks: Mapping[str, Block]) -> Direction:
    """What a rank gets of what an owner made."""
    state = {key: blocks[key].of(entry) if key in blocks else entry for key, entry in whole.state.items()}
    return Direction(blocks["p"].of(whole.tensor), whole.figures, state)


def noise_of(request: Request, x: Tensor) -> Tensor:
    """The same random numbers as one process would have."""
    return draw_noise(x, seed=request.seed, names=[request.name], t=request.t)[0]


def as_stored(request: Request, factor: Tensor, old: Tensor) -> Tensor:
    """A factor as it will be found in the state at the next step: rounded, or the old one if that overflows."""
    assert request.stored is not None
    rounded = factor.to(request.stored).to(request.dtype)
    overflows = request.stored == torch.float16 and not bool(torch.isfinite(rounded).all())
    return old if overflows else rounded


# ---- kernels for GPUs


class Assembled(NamedTuple):
    """A request as the owner has it, put together from all shards."""

    request: Request
    #: Each tensor that the rule shows.
    tensors: Sequence[Tensor]
    #: Whole, with their norms, as they are stored between steps.
    factors: State[Tensor]


class OwnerWhitening:
    """The kernels of one optimizer for the tensors that this rank owns, loaded when first needed."""

    def __init__(self) -> None:
        self.kernels: Any = None

    def whiten(self, works: Sequence[Assembled]) -> dict[str, Direction]:
        """By name the whitened tensor, the mean of its squares, and the factors."""
        if not works:
            return {}
        from thalweg.kernels.triton.kron_owners import Job, OwnerKernels

        if self.kernels is None:
            self.kernels = OwnerKernels()
        batches: dict[Hashable, list[Assembled]] = defaultdict(list)
        for work in works:
            request, first = work.request, work.tensors[0]
            kind = first.device, first.shape, request.rule, request.stored, len(work.tensors), request.seed, request.t
            batches[kind].append(work)
        jobs = []
        for batch in batches.values():
            request = batch[0].request
            learned = [work.tensors[-1] for work in batch]
            jobs.append(
                Job(
                    names=[work.request.name for work in batch],
                    learned=learned,
                    shown=learned if len(batch[0].tensors) == 1 else [work.tensors[0] for work in batch],
                    factors=[work.factors for work in batch],
                    rule=cast(Kron, request.rule),
                    seed=request.seed,
                    t=request.t,
                    due=[bool(work.request.due) for work in batch],
                )
            )
        done = {}
        for batch, (h, squares) in zip(batches.values(), self.kernels.whitened(jobs), strict=True):
            shape = batch[0].request.rule.figure_shape(tuple(batch[0].tensors[0].shape))
            for work, own, square in zip(batch, h, squares, strict=True):
                done[work.request.name] = Direction(own, {"square": square.reshape(shape)}, work.factors)
        return done
