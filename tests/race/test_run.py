"""One run: repeatable, the same for everyone, and undisturbed by a rate that is too large; tasks that are wrong."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from race_tasks import linear, parabola
from tolerances import FLOAT32

from thalweg.race import digits, race
from thalweg.race.contest import find_task
from thalweg.race.run import Result, Training, execute, measuring_times
from thalweg.rules import RULES

DIGITS = find_task("digits")


def result_of(contestant: str, *, seed: int = 0, steps: int = 4, **options: Any) -> Result:
    ready = race(DIGITS, optimizers=[contestant], steps=steps, options={contestant: options})
    sweep = ready.sweeps[contestant]
    return execute(ready.task, sweep.contestant, replace(sweep.first, seed=seed))


@pytest.mark.parametrize("rule", [*RULES, "muon_adamw"])
def test_everyone_learns_and_the_same_run_gives_the_same_result_but_for_its_seconds(rule: str) -> None:
    if rule == "muon_adamw":
        pytest.importorskip("torch")
    # the network is smaller than those for which the rate is typical
    lr = 3 * (RULES["AdamW" if rule == "muon_adamw" else rule].typical_lr or 0)
    result = result_of(rule, lr=lr, steps=44)
    assert (result.loss[-1] or 0) < 0.5 * (result.loss[0] or 0)
    assert (result.score or [0])[-1] > 0.75  # type: ignore[operator]
    assert 0 < result.seconds[1] < result.seconds[-1]
    once, again, other = (result_of(rule, lr=lr, seed=seed) for seed in (0, 0, 1))
    assert once == again
    assert once.loss != other.loss


def test_everyone_starts_from_the_same_place_and_measures_divide_the_steps_evenly() -> None:
    assert len({result_of(rule, steps=1).loss[0] for rule in RULES}) == 1
    assert measuring_times(3) == [0, 1, 2, 3]
    assert set(np.diff(measuring_times(220)).tolist()) == {10}


def test_state_bytes_are_those_of_the_arrays_kept_and_averages_are_what_is_measured() -> None:
    sgd, adamw, adafactor = (result_of(name) for name in ("SGD", "AdamW", "Adafactor"))
    counters = 6 * np.array(0).nbytes  # six parameters, each with its step
    assert sgd.state_bytes == 4 * sgd.parameters + counters
    assert adamw.state_bytes == 8 * adamw.parameters + counters
    assert adafactor.state_bytes < 0.2 * adafactor.parameters
    averaged = result_of("AdamW", averaged=0.9)
    assert averaged.loss[0] == adamw.loss[0]
    assert averaged.loss[-1] != adamw.loss[-1]
    assert averaged.state_bytes == pytest.approx(1.5 * adamw.state_bytes, rel=0.01)


def test_a_run_that_diverges_has_its_full_length_and_no_warning() -> None:
    result = result_of("SGD", lr=1e30)
    assert (result.step, result.loss[1:]) == ([0, 1, 2, 3, 4], [None] * 4)
    (record,) = race(parabola(), optimizers=["SGD"], options={"": {"lr": 300.0}}, steps=4).run().records.values()
    assert record.result.loss[1:] == [pytest.approx(4 * 599**2), None, None, None], "a million times the first"


def test_the_rate_rises_if_asked_and_decays_to_almost_nothing() -> None:
    run = race(parabola(), optimizers=["SGD"], options={"": {"lr": 0.5}}).sweeps["SGD"].first
    rising, falling = (parabola(warm_up=share) for share in (0.1, 0.0))
    wanted = [0.125, 0.25, 0.5, 0.5 * 36 / 37, 0.5 / 37]
    assert [rising.rate_at(replace(run, steps=40), t) for t in (1, 2, 4, 5, 40)] == pytest.approx(wanted)
    assert [falling.rate_at(replace(run, steps=10), t) for t in (1, 2, 10)] == pytest.approx([0.5, 0.45, 0.05])


def test_a_task_of_your_own_that_was_edited_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, more in (("one", ""), ("two", "# edited\n")):
        (tmp_path / f"own_{name}.py").write_text("from race_tasks import parabola as task\n" + more)
    monkeypatch.chdir(tmp_path)
    assert find_task("own_one:task").fingerprint != find_task("own_two:task").fingerprint


@pytest.mark.slow
def test_text_learns_and_repeats_itself() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    first, again = (race("text", optimizers=["AdamW"], options={"": {"lr": 0.01}}, steps=2).run() for _ in range(2))
    assert first.records == again.records
    (result,) = first.summary["results"]
    assert result["loss"] < result["curve"]["loss"][0] - 1
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are left alone"


def test_gradients_are_clipped_together_if_the_task_says_so() -> None:
    """A step of SGD is as long as the rate times the norm."""
    torch = pytest.importorskip("torch")
    ready = race(linear(max_grad_norm=1e-3), optimizers=["SGD"], options={"": {"momentum": 0.0, "lr": 0.5}})
    training = Training(ready.task, ready.sweeps["SGD"].contestant, ready.sweeps["SGD"].first)
    params = list(training.model.parameters())
    before = torch.nn.utils.parameters_to_vector(params).detach()
    training.step(1)
    moved = torch.nn.utils.parameters_to_vector(params).detach() - before
    assert moved.norm().item() == pytest.approx(0.5e-3, rel=FLOAT32)


def test_handwritten_digits_are_those_that_scikit_learn_ships() -> None:
    (train_images, train_labels), (test_images, test_labels) = digits.load()
    assert (train_images.shape, test_images.shape) == ((1437, 64), (360, 64))
    assert np.bincount(test_labels).min() >= 25
    parts = (np.concatenate([train_images, test_images]) * 16, np.concatenate([train_labels, test_labels]))
    content = b"".join(part.astype(np.uint8).tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest() == "0113aa32bd8e58750a54bcdae2a9bf5194cfb4bae3ad71eb5b1be3553b9c0c54"
