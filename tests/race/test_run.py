"""One run: repeatable, the same for everyone, and undisturbed by a rate that is too large."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lanes import one_in
from tolerances import FLOAT32

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask, shuffle_batches
from thalweg.race.contest import race
from thalweg.race.contestants import CONTESTANTS, RATES, enter
from thalweg.race.run import Result, execute, measuring_times
from thalweg.race.task import Schedule
from thalweg.race.tasks import resolve

(DIGITS,) = resolve("digits")


def result_of(contestant: str, *, lr: float | None = None, seed: int = 0, steps: int = 4) -> Result:
    rates = {} if lr is None else {"": [lr]}
    ready = race(DIGITS, optimizers=[contestant], steps=steps, seeds=seed + 1, rates=rates)
    run = next(run for run in ready.programme.courses[0].runs if run.seed == seed)
    return execute(DIGITS, CONTESTANTS[contestant], run)


@pytest.mark.parametrize("contestant", one_in(3, CONTESTANTS, first=1))
def test_everyone_learns(contestant: str) -> None:
    middle = DIGITS.rates.get(contestant, RATES[contestant])[2]
    result = result_of(contestant, lr=middle, steps=44)
    assert result.score is not None
    assert result.loss[0] is not None
    assert result.loss[-1] is not None
    assert result.score[-1] is not None
    assert result.loss[-1] < 0.5 * result.loss[0]
    assert result.score[-1] > 0.75
    assert list(result.seconds) == sorted(result.seconds)
    assert result.seconds[-1] > 0


@pytest.mark.parametrize("contestant", one_in(4, CONTESTANTS))
def test_the_same_run_gives_the_same_result_but_for_its_seconds(contestant: str) -> None:
    first, again, other = (result_of(contestant, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.loss != other.loss


def test_everyone_starts_from_the_same_place() -> None:
    assert len({result_of(name, steps=1).loss[0] for name in CONTESTANTS}) == 1


def test_measures_divide_the_steps_evenly() -> None:
    assert measuring_times(3) == [0, 1, 2, 3]
    times = measuring_times(220)
    assert (times[0], times[-1], len(times)) == (0, 220, 23)
    assert set(np.diff(times).tolist()) == {10}


def test_progress_is_told_at_each_measure() -> None:
    told: list[tuple[Any, ...]] = []
    ready = race(DIGITS, optimizers=["SGD"], steps=6, seeds=1, rates={"": [0.1]})
    outcome = ready.run(lambda *progress: told.append(progress))
    (record,) = outcome.records.values()
    assert [step for _, step, _ in told] == [1, 2, 3, 4, 5, 6]
    assert tuple(loss for _, _, loss in told) == record.result.loss[1:]


def test_state_bytes_are_those_of_the_arrays_kept() -> None:
    sgd, adamw, adafactor = (result_of(name, steps=1) for name in ("SGD", "AdamW", "Adafactor"))
    counters = 6 * np.array(0).nbytes  # six parameters, each with its step
    assert sgd.state_bytes == 4 * sgd.parameters + counters
    assert adamw.state_bytes == 8 * adamw.parameters + counters
    assert adafactor.state_bytes < 0.2 * adafactor.parameters


def test_a_run_that_diverges_has_its_full_length_and_no_warning() -> None:
    result = result_of("SGD", lr=1e30, steps=4)
    assert result.step == (0, 1, 2, 3, 4)
    assert result.loss[0] is not None
    assert result.loss[1:] == (None,) * 4
    assert result.score is not None
    assert result.score[1:] == (None,) * 4
    assert result.layers is not None
    assert result.layers.step == (1,)


def test_a_loss_a_million_times_the_first_is_as_good_as_infinite() -> None:
    steep = parabola(evaluate=lambda params: float(np.square(params["x"]).sum()), steps=4)
    (record,) = race(steep, optimizers=["SGD"], rates={"": [300.0]}).run().records.values()
    assert record.result.loss[0] == 4
    assert record.result.loss[1] == pytest.approx(4 * 599**2)
    assert record.result.loss[2:] == (None,) * 3


def test_update_sizes_and_trust_ratios_are_those_of_the_rule() -> None:
    """LAMB's step has the size lr |p|, by construction, where both norms are positive."""
    result = result_of("LAMB", lr=0.02, steps=5)
    layers = result.layers
    assert layers is not None
    assert layers.trust is not None
    assert layers.names == (
        "hidden.0.weight",
        "hidden.0.bias",
        "hidden.1.weight",
        "hidden.1.bias",
        "output.weight",
        "output.bias",
    )
    for name, sizes, ratios in zip(layers.names, layers.update, layers.trust, strict=True):
        if name.endswith("bias"):  # exempt
            assert set(ratios) == {1.0}
            continue
        np.testing.assert_allclose(sizes, [Schedule(0.02, 5)(t) for t in range(1, 6)], rtol=FLOAT32)
        assert all(ratio is not None and ratio > 0 for ratio in ratios)
    adafactor = result_of("Adafactor", steps=2).layers
    assert adafactor is not None
    assert adafactor.trust is None


def test_the_rate_rises_if_asked_and_decays_to_almost_nothing() -> None:
    rising, falling = Schedule(0.5, 40, warm_up=0.1), Schedule(0.5, 10)
    wanted = [0.125, 0.25, 0.5, 0.5 * 36 / 37, 0.5 / 37]
    assert [rising(t) for t in (1, 2, 4, 5, 40)] == pytest.approx(wanted)
    assert [falling(t) for t in (1, 2, 10)] == pytest.approx([0.5, 0.45, 0.05])


def test_batches_show_everyone_equally_often_whatever_their_size() -> None:
    for size in (1, 3, 7, 10, 25):
        batches = shuffle_batches(10, 0, size)
        seen = np.concatenate([next(batches) for _ in range(20)])
        counts = np.bincount(seen, minlength=10)
        assert len(seen) == 20 * size
        assert counts.max() - counts.min() <= 1


def parabola(**changes: object) -> ArrayTask:
    task = ArrayTask(
        name="parabola",
        init=lambda seed: {"x": np.full(4, 1.0 + seed)},
        gradients=lambda params, batch: {"x": 2 * params["x"]},
        evaluate=lambda params: float(np.square(params["x"]).sum()),
        steps=5,
        seeds=1,
    )
    return replace(task, **changes)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_task_of_a_few_lines_is_raced_with_everyone() -> None:
    summary = race(parabola(), steps=6).run().summary
    (course,) = summary["courses"]
    assert {result["contestant"] for result in course["results"]} == set(CONTESTANTS)
    assert all(result["loss"] < 4 for result in course["results"])
    assert course["score_name"] is None
    assert course["results"][0]["score"] is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(steps=0), "'parabola': steps must be a whole number from 1 on, got 0"),
        (dict(seeds=1.5), "seeds must be a whole number"),
        (dict(name=""), "a task needs a name"),
        (dict(rates={"SGD": [-1.0]}), "rates of SGD must be positive numbers"),
        (dict(rates={"SGD": 0.1}), "rates of SGD must be positive numbers, got 0.1"),
        (dict(rates={"SGD": []}), "rates of SGD must be positive numbers"),
        (dict(rates=[0.1]), "rates must be a dict by optimizer, got list"),
        (dict(rates={"Sgd": [0.1]}), "'parabola': there is no optimizer 'Sgd': did you mean 'SGD'?"),
        (dict(options={"lamb": {}}), "'parabola': there is no optimizer 'lamb': did you mean 'LAMB'?"),
        (dict(options={"SGD": 3}), "options of SGD must be a dict, got 3"),
        (dict(options={"SGD": {"momentumm": 1}}), "'parabola', SGD: SGD has no option 'momentumm'"),
        (dict(target="low"), "target must be a number, a loss, got 'low'"),
        (dict(init=3), "init must be a function, got 3"),
        (dict(init=lambda seed: {"x": [1.0]}), "init must return arrays by name, and 'x' is a list"),
        (dict(evaluate=lambda params: float("nan")), "the loss before the first step is nan"),
        (dict(batches=3), "batches must be a function or None, got 3"),
        (dict(batches=lambda seed, size: 3), "batches must return something to iterate over, got int"),
        (dict(init=lambda seed: [1.0]), "init must return arrays by name, got list"),
        (dict(evaluate=lambda params: "low"), "evaluate must return a loss, or a loss and a score, got str"),
        (dict(evaluate=lambda params: (1, 2, 3)), "evaluate must return a loss, or a loss and a score, got tuple"),
        (dict(gradients=lambda params, batch: {"y": params["x"]}), "'parabola': .*'y'"),
        (dict(gradients=lambda params, batch: {"x": np.ones(3)}), "'parabola': .*'x'"),
        (dict(gradients=lambda params, batch: 1 / 0), r"gradients failed \(.*test_run.py, line \d+\): Zero"),
        (
            dict(batches=lambda seed, size: iter([1, 2])),
            "'parabola': batches must not end: start again after the last one",
        ),
    ],
)
def test_a_task_that_is_wrong_is_told_in_one_sentence(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        race(parabola(**changes), optimizers=["SGD"]).run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(optimizers=["lamb"]), "there is no optimizer 'lamb': did you mean 'LAMB'?"),
        (dict(rates={"kron": [0.1]}), "there is no optimizer 'kron': did you mean 'Kron'?"),
        (dict(rates={"": [0.1, -1]}), "rates of all optimizers must be positive numbers"),
        (dict(steps=0), "steps must be a whole number from 1 on, got 0"),
        (dict(seeds=0), "seeds must be a whole number from 1 on, got 0"),
        (dict(batch_sizes=[8, 0]), "batch_sizes must be whole numbers from 1 on, got 0"),
    ],
)
def test_a_race_that_is_asked_for_wrongly_is_told_in_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        race(DIGITS, **options)


def test_an_error_is_placed_even_in_a_folder_called_thalweg(tmp_path: Path) -> None:
    file = tmp_path / "thalweg" / "own.py"
    space: dict[str, Any] = {}
    exec(compile("def gradients(params, batch):\n    return 1 / 0\n", str(file), "exec"), space)
    with pytest.raises(CommandError, match=rf"gradients failed \({file}, line 2\): ZeroDivisionError"):
        race(parabola(gradients=space["gradients"]), optimizers=["SGD"]).run()


def test_rates_may_be_an_array(tmp_path: Path) -> None:
    rates = np.array([0.1, 0.2], np.float32)
    found = race(parabola(rates={"SGD": rates}, widen=0), optimizers=["SGD"], folder=str(tmp_path)).run()
    assert [run.lr for run in found.records] == rates.tolist()


def test_arrays_have_no_other_device() -> None:
    with pytest.raises(CommandError, match="'parabola' is plain numpy and runs only on the cpu, not on 'cuda'"):
        race(parabola(), optimizers=["SGD"], device="cuda").run()


# ---- rules that race with something around them


def test_names_stand_for_options_around_a_rule() -> None:
    name = enter("adamw+cautious+averaged")
    assert name == "AdamW+cautious+averaged"
    contestant = CONTESTANTS[name]
    assert (contestant.rule, contestant.like) == ("AdamW", "AdamW")
    added = {"cautious": True, "averaged": 0.999, "averaged_warmup": True}
    assert contestant.options == {**CONTESTANTS["AdamW"].options, **added}
    assert CONTESTANTS[enter("sgd+schedule_free")].options == {"momentum": 0.0, "schedule_free": True}
    assert CONTESTANTS[enter("lion+schedule_free")].options["betas"] == (0.0, 0.99)
    assert name not in list(CONTESTANTS), "it races only where it is asked for"
    for unknown, told in (
        ("adamv+cautious", "there is no rule 'adamv': did you mean 'AdamW'?"),
        ("adamw+averagd", "'averagd' does not go around a rule: did you mean 'averaged'?"),
    ):
        with pytest.raises(CommandError, match=re.escape(told)):
            enter(unknown)


def test_averages_are_what_is_measured() -> None:
    """The same training, measured at other parameters."""
    entered = ["AdamW", enter("adamw+averaged")]
    ready = race(DIGITS, optimizers=entered, steps=4, seeds=1, rates={"": [0.01]}, engine="reference")
    plain, averaged = (execute(DIGITS, CONTESTANTS[run.contestant], run) for run in ready.programme.courses[0].runs)
    assert plain.loss[0] == averaged.loss[0]
    assert plain.loss[-1] != averaged.loss[-1]
    assert averaged.state_bytes == pytest.approx(1.5 * plain.state_bytes, rel=0.01)
