"""One loop runs all that waits for other ranks: what asks for the same at once is answered at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch")

from thalweg.torch.sharding.collectives import Computation, Question, in_lockstep, largest


class Ranks:
    """Answers with ten times what is asked, and remembers it."""

    def __init__(self) -> None:
        self.heard: list[list[int]] = []
        self.threads: set[str] = set()

    def answer(self, asked: Sequence[int]) -> list[int]:
        self.heard.append(list(asked))
        self.threads.add(threading.current_thread().name)
        return [10 * each for each in asked]


def asking(answer: Any, rounds: Sequence[Sequence[int]], got: list[Any]) -> Computation:
    for asked in rounds:
        got.append((yield Question(answer, asked)))


def test_one_answer_serves_all_that_ask() -> None:
    ranks, got = Ranks(), ([], [], [])  # type: tuple[Ranks, tuple[list[Any], ...]]
    rounds: list[list[list[int]]] = [[[1, 2], [3]], [[4]], []]
    in_lockstep([asking(ranks.answer, *pair) for pair in zip(rounds, got, strict=True)])
    assert ranks.heard == [[1, 2, 4], [3]]
    assert got == ([[10, 20], [30]], [[40]], [])
    assert ranks.threads == {threading.main_thread().name}


def test_maxima_wait_for_sums() -> None:
    """They are what guards ask for in the end: one message for those that come early and those that come late."""
    ranks, heard = Ranks(), []

    def early() -> Computation:
        heard.append(("max", (yield Question(largest, [(1.0, ())]))))

    def late() -> Computation:
        heard.append(("sum", (yield Question(ranks.answer, [1]))))
        heard.append(("max", (yield Question(largest, [(2.0, ())]))))

    in_lockstep([early(), late()])
    assert heard == [("sum", [10]), ("max", [1.0]), ("max", [2.0])]


def test_a_failure_ends_all_of_them() -> None:
    ranks, ended = Ranks(), []

    def waiting() -> Computation:
        try:
            yield Question(ranks.answer, [1])
            yield Question(ranks.answer, [2])
        finally:
            ended.append(True)

    def failing() -> Computation:
        yield Question(ranks.answer, [3])
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        in_lockstep([waiting(), failing()])
    assert ended == [True]
    assert ranks.heard == [[1, 3]]
