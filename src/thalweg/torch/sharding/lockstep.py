"""Rounds of communication: the sums of all parameters of a step go in one message for each group of ranks.

Each bucket of a step is computed by the same rule, which asks for sums in the middle of its arithmetic. So buckets take
turns: each runs until it asks, and when all have asked, or have ended, one round answers them all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from thalweg.spaces.sharded import Asked
from thalweg.torch.sharding.owners import Owners
from thalweg.torch.sharding.requests import Task

T = TypeVar("T")


class Abandoned(BaseException):
    """Unwinds a job whose step is not taken, because another failed."""


class Job(threading.Thread):
    """The arithmetic of one bucket, in a thread that runs only while all others wait."""

    def __init__(self, compute: Callable[[Job], Any]) -> None:
        super().__init__(daemon=True)
        self.compute = compute
        self.turn, self.back = threading.Semaphore(0), threading.Semaphore(0)
        self.asked: tuple[str, Sequence[Any]] | None = None
        self.answer: list[Any] = []
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = self.abandoned = False
        # what torch keeps for each thread
        self.grad = torch.is_grad_enabled()
        self.stream = torch.cuda.current_stream() if torch.cuda._initialized else None

    def run(self) -> None:
        self.turn.acquire()
        try:
            with torch.set_grad_enabled(self.grad), torch.cuda.stream(self.stream):
                if not self.abandoned:
                    self.result = self.compute(self)
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self.back.release()

    def resume(self) -> None:
        """Let it run until it asks again, or ends."""
        self.asked = None
        self.turn.release()
        self.back.acquire()

    def summed(self, asked: Sequence[Asked]) -> list[Tensor]:
        return self.ask("sum", asked)

    def largest(self, asked: Sequence[Asked]) -> list[Tensor]:
        return self.ask("max", asked)

    def whitened(self, tasks: Sequence[Task]) -> list[Any]:
        """The results of the owners of whole tensors."""
        return self.wait("whole", tasks)

    def ask(self, kind: str, asked: Sequence[Asked]) -> list[Tensor]:
        if not any(groups for _, groups in asked):
            return [tensor for tensor, _ in asked]
        return self.wait(kind, asked)

    def wait(self, kind: str, asked: Sequence[Any]) -> list[Any]:
        """Called by the rule: wait for a round that answers."""
        self.asked = kind, asked
        self.back.release()
        self.turn.acquire()
        if self.abandoned:
            raise Abandoned
        return self.answer


def together(computations: Sequence[Callable[[Any], T]], owners: Owners) -> list[T]:
    """The results of several computations, whose questions are answered together, round by round."""
    jobs = [Job(compute) for compute in computations]
    for job in jobs:
        job.start()
    try:
        for job in jobs:
            job.resume()
            if job.error is not None:
                raise job.error
        while waiting := [job for job in jobs if not job.ended]:
            answer(waiting, owners)
            for job in waiting:
                job.resume()
                if job.error is not None:
                    raise job.error
    finally:
        for job in jobs:
            if not job.ended:
                job.abandoned = True
                job.turn.release()
            job.join()
    return [job.result for job in jobs]


def answer(jobs: Sequence[Job], owners: Owners) -> None:
    """One message for each kind of reduction and each group of ranks; two for whole tensors."""
    questions = [(job, *job.asked) for job in jobs if job.asked is not None]
    for kind in ("whole", "sum", "max"):
        asking = [(job, asked) for job, own, asked in questions if own == kind]
        if not asking:
            continue
        every = [each for _, asked in asking for each in asked]
        answers = iter(owners.whitened(every) if kind == "whole" else reduced(kind, every))
        for job, asked in asking:
            job.answer = [next(answers) for _ in asked]


def reduced(kind: str, asked: Sequence[Asked]) -> list[Tensor]:
    """Every figure reduced over its groups: one flat message for each group, whatever the number of figures."""
    figures = [tensor for tensor, _ in asked]
    for group in dict.fromkeys(group for _, groups in asked for group in groups):
        members = [i for i, (_, groups) in enumerate(asked) if group in groups]
        flat = torch.cat([figures[i].reshape(-1).to(widest(figures, members)) for i in members])
        message = flat.to(group.device)
        operation = torch.distributed.ReduceOp.SUM if kind == "sum" else torch.distributed.ReduceOp.MAX
        torch.distributed.all_reduce(message, operation, group=group.process_group)
        parts = torch.split(message.to(flat.device), [figures[i].numel() for i in members])
        for i, part in zip(members, parts, strict=True):
            figures[i] = part.reshape(figures[i].shape).to(figures[i].dtype)
    return figures


def widest(figures: Sequence[Tensor], members: Sequence[int]) -> torch.dtype:
    return max((figures[i].dtype for i in members), key=lambda dtype: torch.finfo(dtype).bits)
