"""Rules that need whole tensors, on sharded or replicated parameters: each tensor has an owner, which transforms it.

Within the owner's replica, what the rule shows travels to the owners in one message, and what they made of it travels
back in another. Then one message tells all other replicas. A rank keeps its part of every factor, so that checkpoints
can be laid out anew, and the whole factors of the sharded tensors that it owns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.rules import Direction
from thalweg.rules.whole import SLOT, no_loads, owners_of, slots_of
from thalweg.spaces import torch as xp
from thalweg.torch.sharding import collectives
from thalweg.torch.sharding.collectives import Message, widest
from thalweg.torch.sharding.layouts import Block, factor_shapes
from thalweg.torch.sharding.messages import Reader, pack, show, size_answered, size_shown, unpack
from thalweg.torch.sharding.requests import Batch, Request
from thalweg.torch.sharding.shards import MeshGroup
from thalweg.torch.sharding.stages import Begin, Compute, Stage, take_turns
from thalweg.torch.stacks import Parts, draw_noise, most_of_stack, space_of_kernels, transform_stacks

#: Ranks that shard a parameter, and those that replicate it.
TeamKey: TypeAlias = tuple[tuple[MeshGroup, ...], ...]
#: Layouts of messages that are kept: of several slots, with a refresh of factors and without.
MOST_KEPT = 256


class Owners:
    """The teams of ranks over which one optimizer's parameters are sharded or replicated."""

    def __init__(self, slot: int = SLOT) -> None:
        """slot: how many elements travel at a time."""
        self.slot = slot
        self.teams: dict[TeamKey, Team] = {}

    def forget(self) -> None:
        """Drop whole factors, because state was loaded or dropped; the next step gathers them again."""
        for team in self.teams.values():
            team.forget()

    def make(self, requests: Sequence[Request]) -> list[Direction]:
        """Have owners do what is requested; for each request this rank's shards of the results, and of new factors."""
        answers: list[Any] = [None] * len(requests)
        for team, members in self.by_team(requests):
            begun = team.begin([requests[i] for i in members])
            for stage in take_turns([slot.stages(team) for slot in begun]):
                stage.run()
            for i, answer in zip(members, begun[0].answers, strict=True):
                answers[i] = answer.direction()
        return answers

    def by_team(self, requests: Sequence[Request]) -> list[tuple[Team, list[int]]]:
        """Teams, each with the places of the requests that it serves, whose parameters it knows then."""
        together: dict[TeamKey, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            together[team_key(request)].append(index)
        teams = []
        for ranks, members in together.items():
            if ranks not in self.teams:
                self.teams[ranks] = Team(Ranks(ranks[0]), Ranks(ranks[1]), self)
            self.teams[ranks].meet([requests[i] for i in members])
            teams.append((self.teams[ranks], members))
        return teams

    def divide(self, outlines: Sequence[Request]) -> list[tuple[Team, dict[int, list[int]]]]:
        """What travels together, team by team: in each slot, by request, places of parameters."""
        slots: list[tuple[Team, dict[int, list[int]]]] = []
        for team, members in self.by_team(outlines):
            for places in team.divide([outlines[i] for i in members]):
                slots.append((team, {}))
                for at, i in places:
                    slots[-1][1].setdefault(members[at], []).append(i)
        return slots


def team_key(request: Request) -> TeamKey:
    """What names a team: the same for the same ranks, whichever axis of a parameter they shard."""
    part = request.parts[0]
    return tuple(sorted(part.across(None), key=lambda group: group.order)), part.replicas


class Ranks:
    """Ranks that send messages to one another, as one of them sees them; it may be alone."""

    def __init__(self, groups: tuple[MeshGroup, ...]) -> None:
        self.size, self.rank = 1, 0
        if groups:
            self.group = collectives.group_over(groups[0].mesh, sorted({group.dimension for group in groups}))
            self.device = groups[0].device
            self.size = torch.distributed.get_world_size(self.group)
            self.rank = torch.distributed.get_rank(self.group)

    def gather(self, mine: Any) -> list[Any]:
        return collectives.gather_objects(mine, self.group) if self.size > 1 else [mine]


class Slot(NamedTuple):
    """Batches that travel together, and the sizes of what arrives for this rank."""

    batches: Sequence[Batch]
    #: From each rank of this replica: shards of what this rank owns, and what was made for it.
    shown: Sequence[int]
    answered: Sequence[int]
    #: From each replica: what its ranks have made.
    replicated: Sequence[int]


class Team:
    """The ranks over which some parameters are sharded, and their replicas that divide the work."""

    def __init__(self, shards: Ranks, replicas: Ranks, owners: Owners) -> None:
        self.shards, self.replicas = shards, replicas
        self.slot = owners.slot
        #: By name, then by rank: the block of the parameter, and those of its factors.
        self.blocks: dict[str, list[dict[str, Block]]] = {}
        #: The replica, and the rank in it, that transforms a parameter.
        self.owners: dict[str, tuple[int, int]] = {}
        self.loads = no_loads(shards.size, replicas.size)
        #: The whole factors of what this rank owns.
        self.whole: dict[str, State[Tensor]] = {}
        #: Parameters whose owners have their whole factors; the same on every rank.
        self.known: set[str] = set()
        #: By what decides it, what travels together.
        self.slots: dict[Hashable, list[Slot]] = {}

    def forget(self) -> None:
        """Drop whole factors."""
        self.known.clear()
        self.whole.clear()

    def meet(self, requests: Sequence[Request]) -> None:
        """Exchange the layouts of parameters that are not known, if there are any, and choose their owners."""
        given = {name: (request, i) for request in requests for i, name in enumerate(request.names)}
        fresh = {name: place for name, place in given.items() if name not in self.blocks}
        if not fresh:
            return
        everyone = self.shards.gather({name: request.blocks(i) for name, (request, i) in fresh.items()})
        self.blocks.update({name: [theirs[name] for theirs in everyone] for name in fresh})
        costs = [(name, request.rule.cost(request.parts[i].shape)) for name, (request, i) in fresh.items()]
        self.owners.update(zip(fresh, owners_of(costs, self.loads), strict=True))

    def divide(self, requests: Sequence[Request]) -> list[list[tuple[int, int]]]:
        """What travels together: in each slot the places of requests, and of parameters in them.

        Of each owner only so many elements; where every rank has whole tensors, so many of all owners together.
        """
        places, sizes = [], []
        for at, request in enumerate(requests):
            for i, (name, part) in enumerate(zip(request.names, request.parts, strict=True)):
                places.append((at, i))
                sizes.append((self.owners[name], math.prod(part.shape)))
        most = self.slot if self.shards.size > 1 else self.slot // self.replicas.size
        return [[places[at] for at in members] for members in slots_of(sizes, most)]

    def begin(self, requests: Sequence[Request]) -> list[Begun]:
        """The slots of some requests, and what they will fill."""
        dtype = widest([request.dtype for request in requests])
        cold = [self.find_cold(request) for request in requests]
        key = dtype, tuple(facts_of(*pair) for pair in zip(requests, cold, strict=True))
        if key not in self.slots:
            if len(self.slots) == MOST_KEPT:
                self.slots.clear()
            self.slots[key] = self.lay_out(requests, cold, dtype)
        answers = [Parts(len(request.names)) for request in requests]
        return [Begun(slot, requests, dtype, answers) for slot in self.slots[key]]

    def begin_slot(self, requests: Sequence[Request]) -> Begun:
        """The same for requests that were divided before, and travel together."""
        (begun,) = self.begin(requests)
        return begun

    def find_cold(self, request: Request) -> Sequence[bool]:
        """Of each parameter, whether its owner does not have its factors as a whole."""
        if not request.matrices:
            return [False] * len(request.names)
        return [not request.remembered or name not in self.known for name in request.names]

    def lay_out(self, requests: Sequence[Request], cold: Sequence[Sequence[bool]], dtype: torch.dtype) -> list[Slot]:
        """Find what travels together. cold: of each request, which parameters are. dtype: of messages."""
        slots = []
        for members in self.divide(requests):
            alike: dict[Hashable, Batch] = {}
            for at, i in members:
                name, shape = requests[at].names[i], requests[at].parts[i].shape
                owner, blocks = self.owners[name], self.blocks[name]
                kind = at, owner, shape, tuple(tuple(block.items()) for block in blocks), cold[at][i]
                alike.setdefault(kind, Batch(at, [], owner, shape, blocks, cold[at][i])).members.append(i)
            slots.append(self.measure(list(alike.values()), requests, dtype))
        return slots

    def measure(self, batches: Sequence[Batch], requests: Sequence[Request], dtype: torch.dtype) -> Slot:
        """A slot with the sizes of its messages."""
        shown, answered, replicated = [0] * self.shards.size, [0] * self.shards.size, [0] * self.replicas.size
        for batch in batches:
            (replica, owner), request = batch.owner, requests[batch.request]
            size = size_answered(batch, request, dtype, self.shards.rank)
            replicated[replica] += size
            if replica == self.replicas.rank:
                answered[owner] += size
                if owner == self.shards.rank:
                    for rank in range(self.shards.size):
                        shown[rank] += size_shown(batch, request, rank)
        return Slot(batches, shown, answered, replicated)

    def note_known(self, batches: Sequence[Batch], requests: Sequence[Request]) -> None:
        for batch in batches:
            if batch.cold:
                request = requests[batch.request]
                for name in (request.names[i] for i in batch.members):
                    if request.remembered:
                        self.known.add(name)
                    else:
                        self.known.discard(name)

    def work(self, batches: Sequence[Batch], requests: Sequence[Request], readers: list[Reader]) -> list[Direction]:
        """Assemble the tensors that this rank owns, and do the work on them. Readers are empty afterwards."""
        given: list[list[Tensor | Sequence[Tensor]]] = []
        for batch in batches:
            request = requests[batch.request]
            given.append([[tensors[i] for i in batch.members] for tensors in request.tensors])
            if readers:
                given[-1] = [assemble(batch, "p", batch.shape, request.dtype, readers) for _ in request.tensors]
            if batch.cold and readers:
                self.take_factors(batch, request, readers)
        readers.clear()  # do not keep a second copy
        results: list[Direction] = []
        for batch in batches:
            results.append(self.transform(batch, requests[batch.request], given.pop(0)))
        return results

    def transform(self, batch: Batch, request: Request, tensors: Sequence[Tensor | Sequence[Tensor]]) -> Direction:
        """Do the work on a batch, stack by stack, and keep what is remembered of factors."""
        rule = request.rule
        known, like = [self.factors_of(request, i) for i in batch.members], tensors[0][0]

        def draw(members: Sequence[int]) -> Tensor:
            return torch.stack([noise_of(request, batch.members[at], like) for at in members])

        parts = Parts(batch.size)
        for members, transformed in transform_stacks(
            rule,
            tensors,
            {key: [factors[key] for factors in known] for key in request.factors},
            due=[request.due[i] for i in batch.members],
            noise=draw,
            most=most_of_stack(rule, like.device),
            space=space_of_kernels() if request.by_kernels else xp,
        ):
            parts.take(members, transformed)
        direction = parts.direction()
        if request.factors:
            for at, i in enumerate(batch.members):
                self.keep_factors(request, i, {key: direction.state[key][at] for key in request.matrices})
        return direction._replace(figures={key: torch.stack(direction.figures[key]) for key in rule.FIGURES})

    def factors_of(self, request: Request, index: int) -> State[Tensor]:
        """The whole factors of a parameter, and what every rank has."""
        stored = {key: entries[index] for key, entries in request.factors.items()}
        return {**stored, **self.whole.get(request.names[index], {})}

    def keep_factors(self, request: Request, index: int, factors: State[Tensor]) -> None:
        name = request.names[index]
        if not request.remembered:
            self.whole.pop(name, None)
        elif request.changes and request.matrices:
            old = self.whole[name]
            self.whole[name] = {key: as_stored(request, factors[key], old[key]) for key in request.matrices}

    def take_factors(self, batch: Batch, request: Request, readers: Sequence[Reader]) -> None:
        """Keep the whole factors of a batch."""
        shapes = factor_shapes(request.rule, batch.shape)
        stacks = {key: assemble(batch, key, shapes[key], request.dtype, readers) for key in request.matrices}
        for place, i in enumerate(batch.members):
            self.whole[request.names[i]] = {key: stack[place] for key, stack in stacks.items()}


class Begun(NamedTuple):
    """A slot of a step."""

    slot: Slot
    requests: Sequence[Request]
    #: That of its messages.
    dtype: torch.dtype
    #: What it fills, for each request.
    answers: Sequence[Parts]

    def stages(self, team: Team) -> list[Stage]:
        return SlotWork(team, lambda team: self, "").stages()


class SlotWork:
    """One slot of a step: shards go to their owners, are transformed there, go back, and are copied to other replicas.

    The results that other replicas own arrive from them.
    """

    def __init__(
        self,
        team: Team,
        begin: Callable[[Team], Begun],
        what: str,
        take: Callable[[Sequence[Direction]], None] | None = None,
        *,
        launches: bool = False,
    ) -> None:
        """begin: makes the requests when their turn has come. take: is given their answers. what: for people.

        launches: whether all that is done beside messages launches kernels.
        """
        self.team, self.begin, self.take, self.what, self.launches = team, begin, take, what, launches
        #: That which was sent last; None: this rank has none to send in its turn.
        self.message: Message | None = None
        self.results: list[Direction] = []

    def stages(self) -> list[Stage]:
        """Arithmetic, and messages between it."""
        shards, replicas = self.team.shards.size, self.team.replicas.size
        if shards > 1:
            stages = [
                self.compute("show", self.show),
                Begin(f"shards of {self.what} to their owners", self.find_message),
                self.compute("transform", self.send_back),
                Begin(f"{self.what} back from their owners", self.find_message),
                self.compute("take", self.receive),
            ]
        else:
            stages = [self.compute("transform", self.transform)]
        if replicas > 1:
            stages += [Begin(f"{self.what} to replicas", self.find_message), self.compute("take", self.receive_copies)]
        return stages

    def compute(self, verb: str, run: Callable[[], None]) -> Stage:
        return Compute(f"{verb} {self.what}", run, writes=self.take is not None, launches=self.launches)

    def find_message(self) -> Message | None:
        return self.message

    def start(self) -> None:
        self.begun, self.message = self.begin(self.team), None
        here = self.team.replicas.rank
        self.batches = [batch for batch in self.begun.slot.batches if batch.owner[0] == here]
        self.mine = [batch for batch in self.batches if batch.owner[1] == self.team.shards.rank]

    def pairs(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, Request]]:
        return ((batch, self.begun.requests[batch.request]) for batch in batches)

    def send(self, ranks: Ranks, pieces: Sequence[Sequence[Tensor]], incoming: Sequence[int]) -> None:
        self.message = Message(
            pieces,
            incoming,
            dtype=self.begun.dtype,
            device=self.begun.requests[0].tensors[0][0].device,
            group=ranks.group,
            sent_from=ranks.device,
        )

    def read(self) -> list[Reader]:
        return [] if self.message is None else list(map(Reader, self.message.read()))

    def show(self) -> None:
        self.start()
        if self.batches:
            outgoing: list[list[Tensor]] = [[] for _ in range(self.team.shards.size)]
            for batch, request in self.pairs(self.batches):
                outgoing[batch.owner[1]] += show(batch, request)
            self.send(self.team.shards, outgoing, self.begun.slot.shown)

    def work(self) -> None:
        # free received messages before sending results
        self.results = self.team.work(self.mine, self.begun.requests, self.read())
        self.team.note_known(self.batches, self.begun.requests)

    def send_back(self) -> None:
        self.work()
        if self.batches:
            pieces = [
                [
                    piece
                    for (batch, request), result in zip(self.pairs(self.mine), self.results, strict=True)
                    for piece in pack(batch, request, result, self.begun.dtype, batch.blocks[rank])
                ]
                for rank in range(self.team.shards.size)
            ]
            self.results = []
            self.send(self.team.shards, pieces, self.begun.slot.answered)

    def receive(self) -> None:
        if self.batches:
            readers, rank = self.read(), self.team.shards.rank
            self.results = [unpack(b, request, readers[b.owner[1]], rank) for b, request in self.pairs(self.batches)]
        self.send_copies()

    def transform(self) -> None:
        self.start()
        self.work()
        self.send_copies()

    def send_copies(self) -> None:
        if self.team.replicas.size == 1:
            self.finish(self.batches)
            return
        pairs = zip(self.pairs(self.batches), self.results, strict=True)
        piece = [piece for pair, result in pairs for piece in pack(*pair, result, self.begun.dtype)]
        self.results = []
        self.send(self.team.replicas, [piece] * self.team.replicas.size, self.begun.slot.replicated)

    def receive_copies(self) -> None:
        readers, rank, batches = self.read(), self.team.shards.rank, self.begun.slot.batches
        self.results = [unpack(b, request, readers[b.owner[0]], rank) for b, request in self.pairs(batches)]
        self.finish(batches)

    def finish(self, batches: Sequence[Batch]) -> None:
        answers, results = self.begun.answers, self.results
        self.message, self.results = None, []
        del self.begun
        for batch, result in zip(batches, results, strict=True):
            answers[batch.request].take(batch.members, result)
        if self.take is not None:
            self.take([answer.direction() for answer in answers])


def facts_of(request: Request, cold: Sequence[bool]) -> Hashable:
    """What the layout of messages depends on."""
    first = request.parts[0].shape
    norms = tuple((key, request.factors[key][0].shape, request.factors[key][0].dtype) for key in request.norms)
    how = request.changes, request.by_kernels, len(request.tensors), request.rule.figure_shape(first), norms
    return tuple(request.names), tuple(cold), how


def assemble(batch: Batch, key: str, shape: Shape, dtype: torch.dtype, readers: Sequence[Reader]) -> Tensor:
    """A stack of whole tensors, or of one of their factors, from the shards of all ranks."""
    whole = torch.empty((batch.size, *shape), dtype=dtype, device=readers[0].message.device)
    for reader, blocks in zip(readers, batch.blocks, strict=True):
        shards = reader.next_stack(batch.size, blocks[key].shape)
        whole[(slice(None), *blocks[key].slices)].copy_(shards)
    return whole


def noise_of(request: Request, index: int, x: Tensor) -> Tensor:
    """The same random numbers as one process would have."""
    return draw_noise(x, seed=request.seed, names=[request.names[index]], t=request.t[index])[0]


def as_stored(request: Request, factor: Tensor, old: Tensor) -> Tensor:
    """A factor as it will be found in the state at the next step: rounded, or the old one if that overflows."""
    assert request.stored is not None
    rounded = factor.to(request.stored).to(request.dtype)
    overflows = request.stored == torch.float16 and not bool(torch.isfinite(rounded).all())
    return old if overflows else rounded
