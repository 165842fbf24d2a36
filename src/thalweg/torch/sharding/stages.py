"""What a step is a list of: arithmetic of this rank, sums that ranks complete, and messages between them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from thalweg.spaces.sharded import Asked
from thalweg.torch.sharding.collectives import Computation, Message, Question, in_lockstep, summed


class Compute(NamedTuple):
    """Arithmetic of this rank."""

    what: str
    run: Callable[[], object]
    #: Whether parameters, state, or what is remembered of former steps are others afterwards.
    writes: bool = False
    #: Whether it launches kernels and does nothing else: then it may be recorded, and replayed.
    launches: bool = False


class Reduce(NamedTuple):
    """Sums of this rank, completed over ranks in place: one message for each group, whatever their number."""

    what: str
    ask: Callable[[], Sequence[Asked]]
    writes: bool = False
    launches: bool = False

    def run(self) -> None:
        for partial, whole in zip(asked := self.ask(), summed(asked), strict=True):
            put_whole(partial, whole)


class Rounds(NamedTuple):
    """Arithmetic that finds out on the way what it has to ask other ranks: all that ask at once share a message."""

    what: str
    computations: Callable[[], Sequence[Computation]]
    writes: bool = False
    launches: bool = False

    def run(self) -> None:
        in_lockstep(self.computations())


class Sending(NamedTuple):
    """What is done with a message, if this rank has one to send."""

    what: str
    message: Callable[[], Message | None]
    writes: bool = False
    launches: bool = False


class Begin(Sending):
    """A message is sent on its way."""

    def run(self) -> None:
        if (message := self.message()) is not None:
            message.begin()


class Wait(Sending):
    """Until that message has arrived."""

    def run(self) -> None:
        if (message := self.message()) is not None:
            message.wait()


Stage: TypeAlias = Compute | Reduce | Rounds | Begin | Wait
#: By name, what gives the statistics of a parameter's last step.
Statistics: TypeAlias = Mapping[str, Callable[[], dict[str, Any]]]


class Layout(NamedTuple):
    """What an engine makes of its parameters."""

    #: Takes the gradients and numbers of a step; writes tables of the engine and nothing else.
    read: Sequence[Stage]
    #: The step itself. Up to the first stage that writes, nothing is written.
    step: Sequence[Stage]
    statistics: Statistics
    #: Lets go of what one step alone has. taken: whether it was written. None: there is nothing.
    release: Callable[[bool], None] | None = None
    #: Launches that find the sum of squares of each gradient; None: the engine has none.
    squares: Callable[[], Tensor] | None = None
    #: What the launches of a step depend on beside tables; None: they are not recorded.
    key: Callable[[], Hashable] | None = None


def fix(stage: Stage) -> Stage:
    """The same stage for sums, or a message, that stay where in memory they are now."""
    if isinstance(stage, Reduce):
        asked = stage.ask()
        return stage._replace(ask=lambda: asked)
    if isinstance(stage, Sending):
        message = stage.message()
        return stage._replace(message=lambda: message)
    return stage


def put_whole(partial: Asked, whole: Tensor) -> None:
    if whole is not partial[0]:
        partial[0].copy_(whole)


def split_at_write(stages: Sequence[Stage]) -> tuple[Sequence[Stage], Sequence[Stage]]:
    """Those before anything is written, and the others."""
    first = next((i for i, stage in enumerate(stages) if stage.writes), len(stages))
    return stages[:first], stages[first:]


def merge(lists: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Several lists as one. Where more than one asks other ranks, they ask together: as often as the longest has to.

    Ranks have the same lists in the same order, so that their messages fit together.
    """
    ends = [find_end(stages) for stages in lists]
    if sum(map(bool, ends)) < 2:
        return list(chain.from_iterable(lists))
    begun = [list(stages[:end]) for stages, end in zip(lists, ends, strict=True)]
    everything = list(chain.from_iterable(begun))
    what = "; ".join(dict.fromkeys(stage.what for stage in everything if isinstance(stage, (Reduce, Rounds))))

    def computations() -> list[Computation]:
        return [computation for stages in begun if stages for computation in computations_of(stages)]

    rounds = Rounds(what, computations, any(stage.writes for stage in everything))
    return [rounds, *chain.from_iterable(stages[end:] for stages, end in zip(lists, ends, strict=True))]


def find_end(stages: Sequence[Stage]) -> int:
    """How many stages there are up to the last that asks other ranks."""
    return max((i + 1 for i, stage in enumerate(stages) if isinstance(stage, (Reduce, Rounds))), default=0)


def computations_of(stages: Sequence[Stage]) -> Sequence[Computation]:
    """Stages as what finds out on the way what to ask: their rounds, or all of them one after the other."""
    rounds = [stage for stage in stages if isinstance(stage, Rounds)]
    return [each for stage in rounds for each in stage.computations()] if rounds else [one_by_one(stages)]


def one_by_one(stages: Sequence[Stage]) -> Computation:
    for stage in stages:
        if isinstance(stage, Reduce):
            asked = stage.ask()
            for partial, whole in zip(asked, (yield Question(summed, asked)), strict=True):
                put_whole(partial, whole)
        else:
            stage.run()


def take_turns(sending: Sequence[Sequence[Stage]]) -> list[Stage]:
    """Lists in which messages stand between stages of arithmetic, as one: each message travels while others work.

    Each list goes on to its next message before those that began earlier; all ranks in the same order.
    sending: in each list, after each stage of arithmetic but the last, the beginning of a message.
    """
    waiting, running = [list(stages) for stages in sending], list[list[Any]]()
    merged, due = list[Stage](), list[Stage]()
    while running or waiting:
        turn, running = [*([waiting.pop(0)] if waiting else []), *running], []
        for stages in turn:
            if isinstance(stages[0], Begin):
                begun = stages.pop(0)
                due.append(Wait(begun.what, begun.message))
            merged += due
            due = []
            merged.append(stages.pop(0))
            if stages:
                due.append(stages[0])
                running.append(stages)
    return merged
