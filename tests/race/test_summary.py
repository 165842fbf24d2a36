"""What is concluded from records: the best rate, means over seeds, when the target was reached, and who won."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from thalweg.race.contest import race
from thalweg.race.programme import Course, Programme
from thalweg.race.run import Record, Result
from thalweg.race.summary import below_zero, in_percent, summarize
from thalweg.race.task import Run
from thalweg.race.verdict import verdict


def run(contestant: str, lr: float, seed: int) -> Run:
    about = dict(task="t", fingerprint="", contestant=contestant, optimizer=contestant, batch_size=None, steps=2)
    return Run(**about, lr=lr, seed=seed, engine="auto", device="cpu", thalweg="0")  # type: ignore[arg-type]


def result(losses: tuple[float | None, ...], score: float = 0.5, seconds: float = 2.0) -> Result:
    return Result(
        step=(0, 1, 2),
        seconds=(0.0, seconds / 2, seconds),
        loss=losses,
        score=(0.1, 0.2, score),
        layers=None,
        path=None,
        parameters=10,
        state_bytes=40,
        engine="reference",
    )


def summary_of(found: dict[Run, Result], **changes: Any) -> dict[str, Any]:
    usual: dict[str, Any] = dict(name="t", task="t", title="T", about="", batch_size=None, steps=2, contours=None)
    usual |= dict(loss_name="loss", score_name="score", target=0.5, runs=list(found))
    course = Course(**{**usual, **changes})
    plan = Programme(title="T", command="c", contestants={"SGD": "s", "LAMB": "l"}, courses=[course])
    where = {"versions": {}, "machine": {}}
    return summarize(plan, {run: Record(run, result, where) for run, result in found.items() if result is not None})


def test_the_best_rate_has_the_least_mean_final_loss_and_the_score_has_no_say() -> None:
    found = {
        run("SGD", 0.1, 0): result((2.0, 1.0, 0.3), score=0.5),
        run("SGD", 0.1, 1): result((2.0, 1.0, 0.4), score=0.7),
        run("SGD", 1.0, 0): result((2.0, 1.0, 0.1), score=0.9),
        run("SGD", 1.0, 1): result((2.0, 1.0, 0.9), score=0.9),
    }
    (best,) = summary_of(found)["courses"][0]["results"]
    assert best["lr"] == 0.1
    assert best["loss"] == pytest.approx(0.35)
    assert (best["loss_low"], best["loss_high"]) == (0.3, 0.4)
    assert best["score"] == pytest.approx(0.6)
    assert (best["score_low"], best["score_high"]) == (0.5, 0.7)
    losses = [pytest.approx(0.35), pytest.approx(0.5)]
    assert best["sweep"] == {"lr": [0.1, 1.0], "loss": losses, "stopped": [None, None]}


def test_one_seed_that_diverged_spoils_its_rate_and_the_diverged_come_last() -> None:
    found = {
        run("SGD", 0.1, 0): result((2.0, None, None)),
        run("LAMB", 0.1, 0): result((2.0, 1.5, 0.9)),
        run("LAMB", 1.0, 0): result((2.0, None, None)),
    }
    lamb, sgd = summary_of(found)["courses"][0]["results"]
    assert (lamb["contestant"], lamb["lr"], lamb["sweep"]["loss"]) == ("LAMB", 0.1, [0.9, None])
    assert (sgd["contestant"], sgd["loss"], sgd["steps_to_target"]) == ("SGD", None, None)


def test_the_target_is_reached_at_the_first_measure_below_it() -> None:
    found = {
        run("SGD", 0.1, 0): result((2.0, 0.5, 0.1), seconds=2.0),
        run("SGD", 0.1, 1): result((2.0, 0.3, 0.1), seconds=4.0),
    }
    (sgd,) = summary_of(found)["courses"][0]["results"]
    assert (sgd["steps_to_target"], sgd["seconds_to_target"], sgd["seconds"]) == (1, 1.5, 3.0)
    (never,) = summary_of(found, target=0.01)["courses"][0]["results"]
    assert (never["steps_to_target"], never["seconds_to_target"]) == (None, None)
    (nothing,) = summary_of(found, target=None)["courses"][0]["results"]
    assert nothing["steps_to_target"] is None


def test_a_rate_that_not_all_seeds_have_tried_does_not_count_yet() -> None:
    found = {
        run("SGD", 0.1, 0): result((2.0, 1.0, 0.9)),
        run("SGD", 0.1, 1): result((2.0, 1.0, 0.9)),
        run("SGD", 1.0, 0): result((2.0, 1.0, 0.1)),
    }
    (sgd,) = summary_of(found)["courses"][0]["results"]
    assert sgd["lr"] == 0.1


def test_scores_have_a_name_if_there_are_scores() -> None:
    found = {run("SGD", 0.1, 0): result((2.0, 1.0, 0.9))}
    without = {each: replace(outcome, score=None) for each, outcome in found.items()}
    assert summary_of(found, score_name=None)["courses"][0]["score_name"] == "score"
    assert summary_of(found, score_name="luck")["courses"][0]["score_name"] == "luck"
    assert summary_of(without, score_name="luck")["courses"][0]["score_name"] is None


def test_scores_between_0_and_1_are_shares_and_losses_below_zero_are_seen() -> None:
    for score, shares in ((1.0, True), (27.3, False), (-0.1, False)):
        (course,) = summary_of({run("SGD", 0.1, 0): result((2.0, 1.0, 0.9), score=score)})["courses"]
        assert in_percent(course) is shares
    for loss, below in ((0.0, False), (None, False), (-0.1, True)):
        (course,) = summary_of({run("SGD", 0.1, 0): result((2.0, 1.0, loss))})["courses"]
        assert below_zero(course) is below


def test_larger_batches_get_fewer_steps_and_larger_rates() -> None:
    plan = race("digits", batch_sizes=[64, 256, 100_000], seeds=1).programme
    counts = Counter(run.contestant for run in plan.courses[0].runs)
    assert len(set(counts.values())) == 1, "everyone has as many rates"
    assert [course.steps for course in plan.courses] == [220, 55, 1]
    assert [course.name for course in plan.courses] == ["digits@64", "digits@256", "digits@100000"]
    first, second, _ = ([run.lr for run in course.runs if run.contestant == "SGD"] for course in plan.courses)
    assert first == [0.15, 0.2, 0.3, 0.5, 0.7]
    assert second == [0.0375, 0.075, 0.15, 0.3, 0.6, 1.2, 2.4, 4.8], "around 0.3 times the root of 4"
    own = race("digits", batch_sizes=[256], rates={"SGD": [0.5], "": [7.0]}).programme
    assert {(run.contestant == "SGD", run.lr) for run in own.courses[0].runs} == {(True, 0.5), (False, 7.0)}


# ---- who won, in words


def outcome(name: str, *losses: float | None, steps: int | None = None, seconds: float | None = None) -> dict[str, Any]:
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
        ([outcome("A", None)], "Every run of this course diverged."),
        ([outcome("A", 0.5)], "A ended with a loss of 0.5 (one seed)."),
        (
            [outcome("B", 0.7, 0.9), outcome("A", 0.3, 0.5)],
            "A won: it ended with a loss of 0.4 (0.3 to 0.5 over 2 seeds), 50% below B with 0.8 (0.7 to 0.9 over 2",
        ),
        (
            [outcome("A", 0.3, 0.7), outcome("B", 0.6, 1.0)],
            "A leads, but not clearly, for the seeds of both overlap: it ended with a loss of 0.5",
        ),
        (
            [outcome("A", -0.5), outcome("B", 0.25), outcome("C", None)],
            "A leads, in the one seed that ran: it ended with a loss of -0.5 (one seed), 0.75 below B with 0.25 (one "
            "seed). C diverged.",
        ),
        ([outcome("A", 0.5), outcome("B", 0.5), outcome("C", 0.5)], "A, B, and C ended level, with a loss of 0.5"),
        (
            [outcome("A", 0.4999), outcome("B", 0.6), outcome("C", 0.5)],
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
        ([outcome("A", 0.5)], "No contestant reached a loss of 0.1."),
        ([outcome("A", 0.05, steps=7, seconds=3.0)], "A reached a loss of 0.1 first, in 7 steps."),
        (
            [outcome("A", 0.05, steps=1, seconds=3.0), outcome("B", 0.06, steps=9, seconds=0.5)],
            "A reached a loss of 0.1 first, in 1 step. By the clock B was first, after 0.5 s.",
        ),
    ],
)
def test_the_next_sentence_tells_of_the_target(results: list[Any], words: str) -> None:
    assert verdict({"results": results, "loss_name": "loss", "target": 0.1}).endswith(words)


def test_a_unit_stands_behind_the_number() -> None:
    results = [outcome("A", 2.1, 2.3), outcome("B", 2.4, 2.6)]
    said = verdict({"results": results, "loss_name": "loss, nats a byte", "target": 2.0})
    assert said.startswith("A won: it ended with a loss of 2.2 nats a byte (2.1 to 2.3 over 2 seeds), 12% below B with")
    assert said.endswith("No contestant reached a loss of 2 nats a byte.")
