"""Computations that need figures of other ranks, run side by side: one message answers all that ask at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from thalweg.torch.sharding.collectives import largest


class Question(NamedTuple):
    """What a computation needs of other ranks before it can go on."""

    #: Answers the questions of all computations together, in one message for each group of ranks.
    answer: Callable[[Sequence[Any]], Sequence[Any]]
    asked: Sequence[Any]


#: A computation that yields questions and is sent the answers.
Computation: TypeAlias = Generator[Question, Sequence[Any], None]


@torch.compiler.disable
def in_lockstep(computations: Iterable[Computation]) -> None:
    """Run every computation until it asks; when all have asked, or have ended, answer them and go on.

    Ranks have the same computations in the same order, so that their messages fit together.
    """
    running = list(computations)
    try:
        waiting = {each: question for each in running if (question := next(each, None)) is not None}
        while waiting:
            for each, answer in answered(waiting):
                del waiting[each]
                with contextlib.suppress(StopIteration):
                    waiting[each] = each.send(answer)
    finally:
        for each in running:
            each.close()


def answered(waiting: Mapping[Computation, Question]) -> list[tuple[Computation, Sequence[Any]]]:
    """Those that ask the same thing, each with its answer.

    Guards ask for maxima when all else is done: they wait for one another, so that one message serves all of them.
    """
    answer = min((question.answer for question in waiting.values()), key=lambda answer: answer is largest)
    asking = {each: question.asked for each, question in waiting.items() if question.answer == answer}
    answers = iter(answer([figure for asked in asking.values() for figure in asked]))
    return [(each, [next(answers) for _ in asked]) for each, asked in asking.items()]
