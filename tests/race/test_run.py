"""The race itself: fair, repeatable, and undisturbed by a rate that is too large."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from thalweg.race import digits
from thalweg.race.contestants import CONTESTANTS, Contestant
from thalweg.race.run import Progress, Record, best, linear_decay, run

DATA = digits.load()
#: Enough to learn from in an epoch, and quick.
SMALL = replace(DATA, train_images=DATA.train_images[:256], train_labels=DATA.train_labels[:256])


def with_one_rate(contestant: Contestant) -> Contestant:
    return replace(contestant, rates=contestant.rates[2:3])


@pytest.mark.parametrize("contestant", CONTESTANTS, ids=lambda contestant: contestant.name)
def test_everyone_learns(contestant: Contestant) -> None:
    (record,) = run([with_one_rate(contestant)], DATA, epochs=2)
    assert len(record.losses) == len(record.accuracies) == 3
    assert record.losses[-1] < 0.5 * record.losses[0]
    assert record.accuracies[-1] > 0.75
    assert record.seconds > 0


def test_the_same_seed_gives_the_same_records() -> None:
    racing = [with_one_rate(contestant) for contestant in CONTESTANTS]
    first, again, other = (run(racing, SMALL, epochs=1, seeds=[seed]) for seed in (0, 0, 1))
    assert first == again
    assert all(a.losses != b.losses for a, b in zip(first, other, strict=True))


def test_everyone_starts_from_the_same_place() -> None:
    records = run([with_one_rate(contestant) for contestant in CONTESTANTS], SMALL, epochs=1)
    assert len({record.losses[0] for record in records}) == 1


def test_progress_is_told_after_each_epoch() -> None:
    contestant, told = CONTESTANTS[0], list[Progress]()
    records = run([contestant], SMALL, epochs=2, seeds=(0, 1), on_epoch=told.append)
    assert len(told) == 2 * 2 * len(contestant.rates)
    assert [progress.loss for progress in told[:2]] == list(records[0].losses[1:])
    assert [progress.epoch for progress in told[:4]] == [1, 2, 1, 2]


def test_state_bytes_are_those_of_the_arrays_kept() -> None:
    by_name = {contestant.name: with_one_rate(contestant) for contestant in CONTESTANTS}
    racing = [by_name["SGD"], by_name["AdamW"], by_name["Adafactor"]]
    sgd, adamw, adafactor = (record.state_bytes_per_parameter for record in run(racing, SMALL, epochs=1))
    assert sgd == pytest.approx(4, rel=1e-2)  # and a few bytes to count the steps
    assert adamw == pytest.approx(8, rel=1e-2)
    assert adafactor < 0.2


def test_a_run_that_diverges_is_recorded_without_a_warning() -> None:
    sgd = replace(CONTESTANTS[0], rates=(1e30, 0.1))
    diverged, healthy = run([sgd], SMALL, epochs=2)
    assert diverged.losses[1:] == (math.inf, math.inf)
    assert best([diverged, healthy]) == {"SGD": [healthy]}


def test_the_best_rate_has_the_least_mean_final_loss() -> None:
    def record(lr: float, seed: int, loss: float, accuracy: float) -> Record:
        return Record(
            contestant="X",
            lr=lr,
            seed=seed,
            losses=(2.0, loss),
            accuracies=(0.1, accuracy),
            seconds=1.0,
            parameter_count=1,
            state_bytes=8,
        )

    steady = [record(0.1, 0, 0.3, 0.5), record(0.1, 1, 0.3, 0.5)]
    lucky_once = [record(1.0, 0, 0.1, 0.9), record(1.0, 1, 0.9, 0.9)]
    assert best(lucky_once + steady) == {"X": steady}


def test_the_rate_decays_to_almost_nothing() -> None:
    schedule = linear_decay(0.5, 10)
    assert [schedule(1), schedule(10)] == pytest.approx([0.5, 0.05])
    assert np.all(np.diff([schedule(t) for t in range(1, 11)]) < 0)
