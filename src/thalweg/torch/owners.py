"""Rules that need whole tensors, on parameters that are divided: each tensor has an owner, who does the work.

Gradients travel to the owners in one message, what they made of them travels back in another. A rank keeps its part of
every factor, so that checkpoints can be laid out anew, and the whole factors of the tensors it owns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from thalweg.arrays import Shape, State
from thalweg.boundary import first_state, storage
from thalweg.rules import Kron, Update
from thalweg.rules.blocks import is_zero
from thalweg.rules.noise import normal, tensor_id
from thalweg.settings import Handling
from thalweg.spaces import torch as single
from thalweg.spaces.foreach import PerTensor, TensorList
from thalweg.spaces.sharded import Part, ReducedList, Sharded
from thalweg.torch.bucket import Bucket
from thalweg.torch.shards import MeshGroup, placed_like


@dataclass(frozen=True)
class Block:
    """Where a part lies within the whole: its shape, and where it begins."""

    shape: Shape
    offset: Shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def of(self, whole: Tensor) -> Tensor:
        """The part of a whole tensor, sharing its memory."""
        return whole[tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.shape, strict=True))]


@dataclass(frozen=True)
class Task:
    """One parameter that has to be whitened as a whole."""

    name: str
    rule: Kron
    part: Part
    dtype: torch.dtype
    #: What is preconditioned, and what the factors learn from if that is something else.
    shown: Sequence[Tensor]
    #: Parts of the factors, and their norms, as this rank keeps them.
    factors: Mapping[str, Tensor]
    #: The dtype in which factors are stored.
    stored: torch.dtype
    due: bool
    seed: int
    t: Any

    @property
    def cost(self) -> float:
        """In multiplications, about: products with every dense factor, and of the factors with one another."""
        sizes = self.rule.sizes(self.part.shape)
        dense = [n for n, d in zip(sizes, self.rule.diagonals(sizes), strict=True) if not d]
        return math.prod(self.part.shape) * (1 + sum(dense)) + sum(n**3 for n in dense)


class Team:
    """The ranks that hold the parts of some parameters, and who of them owns which."""

    def __init__(self, groups: tuple[MeshGroup, ...]) -> None:
        self.mesh = groups[0].mesh
        dimensions = sorted({group.dimension for group in groups})
        self.group, self.device = group_over(self.mesh, dimensions), groups[0].device
        self.size = torch.distributed.get_world_size(self.group)
        self.rank = torch.distributed.get_rank(self.group)
        #: By name, then by rank: the block of the parameter, and those of its factors.
        self.blocks: dict[str, list[dict[str, Block]]] = {}
        self.owners: dict[str, int] = {}

    def learn(self, tasks: Sequence[Task], own: Mapping[str, dict[str, Block]]) -> None:
        """Who holds what, told by everyone once; and owners, the dearest tensors first to whoever has least to do."""
        everyone: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(everyone, dict(own), group=self.group)
        self.blocks = {task.name: [theirs[task.name] for theirs in everyone] for task in tasks}
        load = [0.0] * self.size
        for task in sorted(tasks, key=lambda task: (-task.cost, task.name)):
            owner = min(range(self.size), key=lambda rank: (load[rank], rank))
            self.owners[task.name] = owner
            load[owner] += task.cost


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


class Owners:
    """What one optimizer keeps for the tensors that it owns."""

    def __init__(self) -> None:
        self.teams: dict[tuple[MeshGroup, ...], Team] = {}
        #: The whole factors of what this rank owns; state that was loaded since makes them stale.
        self.whole: dict[str, State[Tensor]] = {}
        #: Tensors whose whole factors their owners have; the same on every rank.
        self.known: set[str] = set()

    def forget(self) -> None:
        """State has been loaded or dropped: whole factors are gathered anew."""
        self.whole, self.known = {}, set()

    def whitened(self, tasks: Sequence[Task]) -> list[tuple[Tensor, Tensor, State[Tensor]]]:
        """For each task this rank's part of what was whitened, the mean of its squares, and parts of its factors."""
        by_team: dict[tuple[MeshGroup, ...], list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            by_team[tuple(dict.fromkeys(group for axis in task.part.groups for group in axis))].append(index)
        answers: list[Any] = [None] * len(tasks)
        for groups, members in by_team.items():
            team = self.teams.get(groups)
            if team is None:
                team = self.teams[groups] = Team(groups)
            own = [tasks[i] for i in members]
            for i, answer in zip(members, self.within(team, own), strict=True):
                answers[i] = answer
        return answers

    def within(self, team: Team, tasks: Sequence[Task]) -> list[tuple[Tensor, Tensor, State[Tensor]]]:
        if any(task.name not in team.blocks for task in tasks):
            team.learn(tasks, {task.name: blocks_of(task) for task in tasks})
            self.forget()
        device = tasks[0].shown[0].device
        # factors that their owner does not know as a whole travel with the gradients
        cold = {task.name for task in tasks} - self.known
        wide = max((task.dtype for task in tasks), key=lambda dtype: torch.finfo(dtype).bits)

        def outgoing(owner: int) -> list[Tensor]:
            sent = []
            for task in tasks:
                if team.owners[task.name] == owner:
                    sent += list(task.shown)
                    if task.name in cold:
                        sent += [task.factors[key] for key in factor_keys(task)]
            return sent

        def incoming(rank: int) -> int:
            """How much another rank sends to this one."""
            total = 0
            for task in tasks:
                if team.owners[task.name] == team.rank:
                    blocks = team.blocks[task.name][rank]
                    total += len(task.shown) * blocks["p"].size
                    if task.name in cold:
                        total += sum(blocks[key].size for key in factor_keys(task))
            return total

        received = exchanged(
            [outgoing(owner) for owner in range(team.size)],
            [incoming(rank) for rank in range(team.size)],
            team,
            wide,
            device,
        )
        results = self.worked(team, tasks, received, cold, device)
        self.known |= cold

        def returned(rank: int) -> list[Tensor]:
            sent = []
            for task in tasks:
                if task.name in results:
                    h, h_square, factors = results[task.name]
                    blocks = team.blocks[task.name][rank]
                    sent += [blocks["p"].of(h), h_square]
                    if task.due:
                        sent += [blocks[key].of(factors[key]) for key in factor_keys(task)]
                        sent += [factors[key] for key in norm_keys(task)]
            return sent

        def awaited(owner: int) -> int:
            total = 0
            for task in tasks:
                if team.owners[task.name] == owner:
                    total += sum(math.prod(shape) for shape in answer_shapes(team, task))
            return total

        messages = exchanged(
            [returned(rank) for rank in range(team.size)],
            [awaited(owner) for owner in range(team.size)],
            team,
            wide,
            device,
        )
        places = [0] * team.size
        answers = []
        for task in tasks:
            owner = team.owners[task.name]
            pieces = []
            for shape in answer_shapes(team, task):
                size = math.prod(shape)
                pieces.append(messages[owner][places[owner] : places[owner] + size].reshape(shape).to(task.dtype))
                places[owner] += size
            h, h_square, *rest = pieces
            keys = [*factor_keys(task), *norm_keys(task)]
            state = dict(zip(keys, rest, strict=True)) if task.due else {key: task.factors[key] for key in keys}
            answers.append((h, h_square, state))
        return answers

    def worked(
        self, team: Team, tasks: Sequence[Task], received: Sequence[Tensor], cold: set[str], device: torch.device
    ) -> dict[str, tuple[Tensor, Tensor, State[Tensor]]]:
        """What this rank owns, whitened."""
        places, results = [0] * team.size, {}

        def put_together(task: Task, key: str, shape: Shape) -> Tensor:
            whole = torch.empty(shape, dtype=task.dtype, device=device)
            for rank in range(team.size):
                block = team.blocks[task.name][rank][key]
                piece = received[rank][places[rank] : places[rank] + block.size]
                block.of(whole).copy_(piece.reshape(block.shape))
                places[rank] += block.size
            return whole

        # what each rank sent is in the order of the tasks
        for task in tasks:
            if team.owners[task.name] != team.rank:
                continue
            shown = [put_together(task, "p", task.part.shape) for _ in task.shown]
            if task.name in cold:
                shapes = factor_shapes(task)
                self.whole[task.name] = {key: put_together(task, key, shapes[key]) for key in factor_keys(task)}
            known = {**self.whole[task.name], **{key: task.factors[key] for key in norm_keys(task)}}
            x, y = shown[0], shown[-1]

            def noise(task: Task = task, x: Tensor = x) -> Tensor:
                made: Tensor = normal(single, x, seed=task.seed, tensor=tensor_id(task.name), t=task.t)
                return made

            h, h_square, factors = task.rule.whitened(single, x, y, known, task.due, noise)
            if task.due:
                self.whole[task.name] = {key: self.as_stored(task, key, factors[key]) for key in factor_keys(task)}
            results[task.name] = h, h_square, factors
        return results

    def as_stored(self, task: Task, key: str, factor: Tensor) -> Tensor:
        """A factor as it will be found in the state at the next step: rounded, or the old one if that overflows."""
        rounded = factor.to(task.stored).to(task.dtype)
        if task.stored == torch.float16 and not bool(torch.isfinite(rounded).all()):
            return self.whole[task.name][key]
        return rounded


class Owned:
    """A rule that needs whole tensors, as the boundary sees it: its middle part is done by the owners."""

    def __init__(self, rule: Kron, bucket: Bucket) -> None:
        self.rule, self.bucket = rule, bucket

    def update(
        self,
        xp: Sharded,
        g: TensorList,
        s: State[TensorList],
        p: TensorList,
        *,
        t: Any,
        lr: Any,
        lr_scale: Any,
        noise: Callable[[], Any],
    ) -> Update:
        x, y, due, state = self.rule.shown(xp, g, s, p, t)
        keys = [key for key in s if key.startswith(("Q_", "L_"))]
        bucket, handling = self.bucket, self.bucket.setting.handling
        tasks = [
            Task(
                name=name,
                rule=self.rule,
                part=bucket.parts[i],
                dtype=x.tensors[i].dtype,
                shown=[x.tensors[i]] if x is y else [x.tensors[i], y.tensors[i]],
                factors={key: s[key].tensors[i] for key in keys},
                stored=bucket.states[i]["Q_0"].dtype,
                due=bool(due.tensors[i]),
                seed=handling.seed,
                t=t.values[i] if isinstance(t, PerTensor) else t,
            )
            for i, name in enumerate(bucket.names)
        ]
        answers = xp.exchange.whitened(tasks)  # type: ignore[attr-defined]
        h = TensorList([answer[0] for answer in answers])
        h_square = ReducedList([answer[1] for answer in answers], tuple(range(len(bucket.parts[0].shape))))
        factors = {key: TensorList([answer[2][key] for answer in answers]) for key in keys}
        return self.rule.taken(xp, h, h_square, s, p, {**state, **factors}, due, lr * lr_scale)


def exchanged(
    outgoing: Sequence[Sequence[Tensor]], incoming: Sequence[int], team: Team, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One message of everyone to everyone: what is for each rank, and what came from each."""
    empty = torch.empty(0, dtype=dtype, device=device)
    flat = [torch.cat([empty, *(piece.reshape(-1).to(dtype) for piece in pieces)]) for pieces in outgoing]
    message = torch.cat(flat).to(team.device)
    arrived = torch.empty(sum(incoming), dtype=dtype, device=team.device)
    torch.distributed.all_to_all_single(
        arrived, message, list(incoming), [piece.numel() for piece in flat], group=team.group
    )
    return list(torch.split(arrived.to(device), list(incoming)))


def factor_keys(task: Task) -> list[str]:
    return [key for key in task.factors if key.startswith("Q_")]


def norm_keys(task: Task) -> list[str]:
    return [key for key in task.factors if key.startswith("L_")]


def factor_shapes(task: Task) -> dict[str, Shape]:
    """Of the whole factors."""
    stack, sizes = task.part.shape[: task.rule.stacked_axes], task.rule.sizes(task.part.shape)
    diagonals = task.rule.diagonals(sizes)
    return {
        f"Q_{i}": (*stack, n) if diagonal else (*stack, n, n)
        for i, (n, diagonal) in enumerate(zip(sizes, diagonals, strict=True))
    }


def square_shape(task: Task) -> Shape:
    """Of the mean of squares: one for each slice, with as many axes as the factors have."""
    return (math.prod(task.part.shape[: task.rule.stacked_axes]), *[1] * len(task.rule.sizes(task.part.shape)))


def answer_shapes(team: Team, task: Task) -> list[Shape]:
    """What this rank gets back, piece by piece."""
    blocks = team.blocks[task.name][team.rank]
    shapes = [blocks["p"].shape, square_shape(task)]
    if task.due:
        shapes += [blocks[key].shape for key in factor_keys(task)]
        shapes += [tuple(task.factors[key].shape) for key in norm_keys(task)]
    return shapes


def blocks_of(task: Task) -> dict[str, Block]:
    """What this rank holds of a parameter and of its factors."""
    blocks = {"p": Block(tuple(task.shown[0].shape), task.part.offset)}
    for key in factor_keys(task):
        held = task.factors[key]
        blocks[key] = block_of_factor(factor_shapes(task)[key], task.part)
        assert blocks[key].shape == tuple(held.shape)
    return blocks


def block_of_factor(shape: Shape, part: Part) -> Block:
    """What this rank keeps of a factor of a divided parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = placements_of_factors(part)
    held, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Block(tuple(held), tuple(offset))


def placements_of_factors(part: Part) -> tuple[Any, list[Any]]:
    """Factors are divided by rows, over the same dimensions of the mesh as their parameter."""
    from torch.distributed.tensor import Replicate, Shard

    groups = [group for axis in part.groups for group in axis]
    mesh, dimensions = groups[0].mesh, {group.dimension for group in groups}
    return mesh, [Shard(0) if dimension in dimensions else Replicate() for dimension in range(mesh.ndim)]


def first_owned(p: Tensor, held: Tensor, part: Part, rule: Kron, handling: Handling) -> State[Tensor]:
    """The state of a distributed parameter before its first step: momentum like itself, and rows of every factor."""
    kept = {}
    if not is_zero(rule.momentum):
        dtype = storage("momentum_buffer", single.dtype(held), handling)
        kept["momentum_buffer"] = placed_like(torch.zeros_like(held, dtype=getattr(torch, dtype)), p, ())
    # a whole tensor that takes no memory: factors follow its shape, dtype and device alone
    ghost = torch.zeros((), dtype=p.dtype, device=held.device).expand(p.shape)
    made = first_state(single, replace(rule, momentum=0.0), handling, ghost)
    return {**kept, **(divided(made, part) if any(part.groups) else made)}


def divided(made: State[Tensor], part: Part) -> State[Tensor]:
    """Whole factors as DTensors, of which each rank keeps its rows."""
    from torch.distributed.tensor import DTensor

    mesh, placements = placements_of_factors(part)
    for key, entry in made.items():
        if key.startswith("Q_"):
            rows = block_of_factor(tuple(entry.shape), part).of(entry).clone()
            made[key] = DTensor.from_local(
                rows, mesh, placements, run_check=False, shape=entry.shape, stride=entry.stride()
            )
    return made
