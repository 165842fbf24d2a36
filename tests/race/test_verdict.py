"""Who won, in words: by how much, with the spread of seeds, and never more surely than the runs allow."""

from __future__ import annotations

from typing import Any

import pytest

from thalweg.race.verdict import verdict


def result(name: str, *losses: float | None, steps: int | None = None, seconds: float | None = None) -> dict[str, Any]:
    known = [loss for loss in losses if loss is not None]
    whole = len(known) == len(losses)
    return {
        "contestant": name,
        "seeds": len(losses),
        "loss": sum(known) / len(known) if whole else None,
        "loss_low": min(known, default=None),
        "loss_high": max(known, default=None),
        "steps_to_target": steps,
        "seconds_to_target": seconds,
    }


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "No run of this course is recorded yet."),
        ([result("A", None)], "Every run of this course diverged."),
        ([result("A", 0.5)], "A ended with a loss of 0.5 (one seed)."),
        (
            [result("B", 0.7, 0.9), result("A", 0.3, 0.5)],
            "A won: it ended with a loss of 0.4 (0.3 to 0.5 over 2 seeds), 50% below B with 0.8 (0.7 to 0.9 over 2",
        ),
        (
            [result("A", 0.3, 0.7), result("B", 0.6, 1.0)],
            "A leads, but not clearly, for the seeds of both overlap: it ended with a loss of 0.5",
        ),
        (
            [result("A", -0.5), result("B", 0.25), result("C", None)],
            "A leads, in the one seed that ran: it ended with a loss of -0.5 (one seed), 0.75 below B with 0.25 (one "
            "seed). C diverged.",
        ),
        ([result("A", 0.5), result("B", 0.5), result("C", 0.5)], "A, B, and C ended level, with a loss of 0.5"),
        (
            [result("A", 0.4999), result("B", 0.6), result("C", 0.5)],
            "A and C ended level, with a loss of 0.5 (one seed), 17% below B with 0.6 (one seed), in the one seed "
            "that ran.",
        ),
    ],
)
def test_the_first_sentence_says_who_won_and_by_how_much(results: list[Any], words: str) -> None:
    assert verdict({"results": results, "loss_name": "loss", "target": None}).startswith(words)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([result("A", 0.5)], "No contestant reached a loss of 0.1."),
        ([result("A", 0.05, steps=7, seconds=3.0)], "A reached a loss of 0.1 first, in 7 steps."),
        (
            [result("A", 0.05, steps=1, seconds=3.0), result("B", 0.06, steps=9, seconds=0.5)],
            "A reached a loss of 0.1 first, in 1 step. By the clock B was first, after 0.5 s.",
        ),
    ],
)
def test_the_next_sentence_tells_of_the_target(results: list[Any], words: str) -> None:
    assert verdict({"results": results, "loss_name": "loss", "target": 0.1}).endswith(words)


def test_a_unit_stands_behind_the_number() -> None:
    results = [result("A", 2.1, 2.3), result("B", 2.4, 2.6)]
    said = verdict({"results": results, "loss_name": "loss, nats a byte", "target": 2.0})
    assert said.startswith("A won: it ended with a loss of 2.2 nats a byte (2.1 to 2.3 over 2 seeds), 12% below B with")
    assert said.endswith("No contestant reached a loss of 2 nats a byte.")
