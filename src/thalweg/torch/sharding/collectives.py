"""Messages between ranks: all that this front end sends goes through these functions.

Computations that need figures of other ranks run side by side: one message answers all that ask at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from thalweg.spaces.sharded import Asked
from thalweg.torch.private import borrow
from thalweg.torch.sharding.shards import MeshGroup


def summed(asked: Sequence[Asked]) -> list[Tensor]:
    """Every figure summed over its groups."""
    return reduce(torch.distributed.ReduceOp.SUM, asked) if is_sent(asked) else [figure for figure, _ in asked]


def largest(asked: Sequence[Asked]) -> list[Tensor]:
    """Every figure as the rank has it that has the largest."""
    return reduce(torch.distributed.ReduceOp.MAX, asked) if is_sent(asked) else [figure for figure, _ in asked]


def is_sent(asked: Sequence[Asked]) -> bool:
    return any(groups for _, groups in asked)


def reduce(operation: Any, asked: Sequence[Asked]) -> list[Tensor]:
    """Every figure reduced over its groups: one flat message for each group, whatever the number of figures.

    One that is alone in its message is reduced where it is.
    """
    figures = [tensor for tensor, _ in asked]
    for group in dict.fromkeys(group for _, groups in asked for group in groups):
        members = [i for i, (_, groups) in enumerate(asked) if group in groups]
        first = figures[members[0]]
        if len(members) == 1 and first.device.type == group.device and first.is_contiguous():
            torch.distributed.all_reduce(first, operation, group=group.process_group)
            continue
        dtype = widest([figures[i].dtype for i in members])
        flat = [figures[i].reshape(-1).to(dtype) for i in members]
        message = torch.cat(flat).to(group.device)
        torch.distributed.all_reduce(message, operation, group=group.process_group)
        for i, part in zip(members, torch.split(message, [x.numel() for x in flat]), strict=True):
            figures[i] = part.reshape(figures[i].shape).to(figures[i])
    return figures


def all_to_all(arrived: Tensor, sent: Tensor, incoming: list[int], outgoing: list[int], group: Any) -> Any:
    """Begin one: what torch.distributed.all_to_all_single does beside this takes the host longer."""
    return group.alltoall_base(arrived, sent, incoming, outgoing)


class Message:
    """One all-to-all: pieces for each rank of a group, and those from each.

    It is begun, waited for and read; begun and waited for again and again where launches are recorded. incoming: the
    sizes of what arrives from each rank. device: where tensors are. sent_from: where messages have to be.
    """

    def __init__(
        self,
        outgoing: Sequence[Sequence[Tensor]],
        incoming: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Any,
        sent_from: str,
    ) -> None:
        self.device, self.group, self.work = device, group, cast(Any, None)
        flat = [piece.reshape(-1).to(dtype) for pieces in outgoing for piece in pieces]
        sent = (torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)).to(sent_from)
        self.sizes = list(incoming), [sum(piece.numel() for piece in pieces) for pieces in outgoing]
        self.memory: Any = torch.empty(sum(incoming), dtype=dtype, device=sent_from), sent
        self.is_recorded = sent.is_cuda and torch.cuda.is_current_stream_capturing()

    def begin(self) -> None:
        (arrived, sent), (incoming, outgoing) = self.memory, self.sizes
        self.work = all_to_all(arrived, sent, incoming, outgoing, self.group)

    def wait(self) -> None:
        """A GPU waits by itself, and not the host."""
        self.work.wait()
        self.work = None

    def read(self) -> list[Tensor]:
        """What has arrived from each rank, after it was waited for."""
        arrived, sent = self.memory
        # a recorded step does not keep memory alive that later launches of it may use
        self.memory = (borrow(arrived), borrow(sent)) if self.is_recorded else ()
        return list(torch.split(arrived.to(self.device), self.sizes[0]))


def gather_objects(mine: Any, group: Any) -> list[Any]:
    """An object of each rank of a group, in their order."""
    theirs: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(theirs, mine, group=group)
    return theirs


def largest_words(words: Tensor, group: MeshGroup) -> Tensor:
    """Whole numbers, each as the rank has it that has the largest; on the host."""
    message = words.to(group.device)
    torch.distributed.all_reduce(message, torch.distributed.ReduceOp.MAX, group=group.process_group)
    return message.cpu()


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


def widest(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)


# ---- in lockstep


class Question(NamedTuple):
    """What a computation needs of other ranks before it can go on."""

    #: Answers the questions of all computations together, in one message for each group of ranks.
    answer: Callable[[Sequence[Any]], Sequence[Any]]
    asked: Sequence[Any]


#: A computation that yields questions and is sent the answers.
Computation: TypeAlias = Generator[Question, Sequence[Any], None]


def in_lockstep(computations: Iterable[Computation]) -> None:
    """Run every computation until it asks; when all have asked, or have ended, answer them and go on.

    Ranks have the same computations in the same order, so that their messages fit together.
    """
    begun = list(computations)
    try:
        waiting = {computation: question for computation in begun if (question := next(computation, None)) is not None}
        while waiting:
            for computation, answer in answer_together(waiting):
                del waiting[computation]
                with contextlib.suppress(StopIteration):
                    waiting[computation] = computation.send(answer)
    finally:
        for computation in begun:
            computation.close()


def answer_together(waiting: Mapping[Computation, Question]) -> list[tuple[Computation, Sequence[Any]]]:
    """Those that ask the same thing, each with its answer.

    Guards ask for maxima when all else is done: they wait for one another, so that one message serves all of them.
    """
    if len(waiting) == 1:
        ((computation, question),) = waiting.items()
        return [(computation, question.answer(question.asked))]
    answer = min((question.answer for question in waiting.values()), key=lambda answer: answer is largest)
    asking = {computation: question.asked for computation, question in waiting.items() if question.answer == answer}
    answers = iter(answer([figure for asked in asking.values() for figure in asked]))
    return [(computation, [next(answers) for _ in asked]) for computation, asked in asking.items()]
