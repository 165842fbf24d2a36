"""One run: repeatable, the same for everyone, and undisturbed by a rate that is too large; tasks that are wrong."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lanes import one_in
from race_tasks import linear, parabola
from tolerances import FLOAT32

from thalweg.errors import CommandError
from thalweg.race import race
from thalweg.race.array_task import shuffle_batches
from thalweg.race.contest import find_task
from thalweg.race.run import Result, execute, measuring_times
from thalweg.rules import RULES

DIGITS = find_task("digits")


def result_of(contestant: str, *, lr: float | None = None, seed: int = 0, steps: int = 4, **asked: Any) -> Result:
    ready = race(DIGITS, optimizers=[contestant], steps=steps, rates={} if lr is None else {"": [lr]}, **asked)
    run = replace(ready.sweeps[contestant].first, seed=seed)
    return execute(ready.task, ready.contestants[contestant], run)


@pytest.mark.parametrize("rule", one_in(3, [*RULES, "muon_adamw"], first=1))
def test_everyone_learns(rule: str) -> None:
    if rule == "muon_adamw":
        pytest.importorskip("torch")
    # the network is smaller than those for which the rate is typical
    result = result_of(rule, lr=3 * RULES["AdamW" if rule == "muon_adamw" else rule].typical_lr, steps=44)
    assert result.score is not None
    assert result.loss[-1] < 0.5 * result.loss[0]  # type: ignore[operator]
    assert result.score[-1] > 0.75  # type: ignore[operator]
    assert list(result.seconds) == sorted(result.seconds)
    assert result.seconds[-1] > 0


@pytest.mark.parametrize("rule", one_in(4, RULES))
def test_the_same_run_gives_the_same_result_but_for_its_seconds(rule: str) -> None:
    first, again, other = (result_of(rule, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert first.loss != other.loss


def test_everyone_starts_from_the_same_place() -> None:
    assert len({result_of(rule, steps=1).loss[0] for rule in RULES}) == 1


def test_measures_divide_the_steps_evenly_and_are_told() -> None:
    assert measuring_times(3) == [0, 1, 2, 3]
    assert set(np.diff(measuring_times(220)).tolist()) == {10}
    told: list[tuple[Any, ...]] = []
    ready = race(DIGITS, optimizers=["SGD"], steps=6, seeds=1, rates={"": [0.1]})
    (record,) = ready.run(lambda *progress: told.append(progress)).records.values()
    assert [step for _, step, _ in told] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, _, loss in told] == record.result.loss[1:]


def test_state_bytes_are_those_of_the_arrays_kept() -> None:
    sgd, adamw, adafactor = (result_of(name, steps=1) for name in ("SGD", "AdamW", "Adafactor"))
    counters = 6 * np.array(0).nbytes  # six parameters, each with its step
    assert sgd.state_bytes == 4 * sgd.parameters + counters
    assert adamw.state_bytes == 8 * adamw.parameters + counters
    assert adafactor.state_bytes < 0.2 * adafactor.parameters


def test_a_run_that_diverges_has_its_full_length_and_no_warning() -> None:
    result = result_of("SGD", lr=1e30, steps=4)
    assert result.step == [0, 1, 2, 3, 4]
    assert result.score is not None
    assert result.loss[1:] == result.score[1:] == [None] * 4
    (record,) = race(parabola(), optimizers=["SGD"], rates={"": [300.0]}, steps=4).run().records.values()
    assert record.result.loss[1] == pytest.approx(4 * 599**2)
    assert record.result.loss[2:] == [None] * 3, "a loss a million times the first is as good as infinite"


def test_the_rate_rises_if_asked_and_decays_to_almost_nothing() -> None:
    run = race(parabola(), optimizers=["SGD"], rates={"": [0.5]}).sweeps["SGD"].first
    rising, falling = (parabola(warm_up=share) for share in (0.1, 0.0))
    wanted = [0.125, 0.25, 0.5, 0.5 * 36 / 37, 0.5 / 37]
    assert [rising.rate_at(replace(run, steps=40), t) for t in (1, 2, 4, 5, 40)] == pytest.approx(wanted)
    assert [falling.rate_at(replace(run, steps=10), t) for t in (1, 2, 10)] == pytest.approx([0.5, 0.45, 0.05])


def test_batches_show_everyone_equally_often_whatever_their_size() -> None:
    for size in (1, 3, 7, 10, 25):
        batches = shuffle_batches(10, 0, size)
        seen = np.concatenate([next(batches) for _ in range(20)])
        counts = np.bincount(seen, minlength=10)
        assert len(seen) == 20 * size
        assert counts.max() - counts.min() <= 1


def test_averages_are_what_is_measured() -> None:
    """The same training, measured at other parameters."""
    options = {"AdamW": {"averaged": 0.9}}
    plain, averaged = (result_of("AdamW", lr=0.01, options=asked) for asked in ({}, options))
    assert plain.loss[0] == averaged.loss[0]
    assert plain.loss[-1] != averaged.loss[-1]
    assert averaged.state_bytes == pytest.approx(1.5 * plain.state_bytes, rel=0.01)


# ---- tasks


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(steps=0), "'parabola': steps must be a whole number from 1 on, got 0"),
        (dict(seeds=1.5), "seeds must be a whole number"),
        (dict(name=""), "a task needs a name"),
        (dict(target="low"), "target must be a number, a loss, got 'low'"),
        (dict(best_score="all"), "best_score must be 'most' or 'least', got 'all'"),
        (dict(warm_up=1), "warm_up must be a share of the steps below 1, got 1"),
        (dict(init=3), "init must be a function, got 3"),
        (dict(init=lambda seed: {"x": [1.0]}), "init must return arrays by name, and 'x' is a list"),
        (dict(init=lambda seed: [1.0]), "init must return arrays by name, got list"),
        (dict(evaluate=lambda params: float("nan")), "the loss before the first step is nan"),
        (dict(evaluate=lambda params: "low"), "evaluate must return a loss, or a loss and a score, got str"),
        (dict(evaluate=lambda params: (1, 2, 3)), "evaluate must return a loss, or a loss and a score, got tuple"),
        (dict(batches=3), "batches must be a function, got 3"),
        (dict(batches=lambda seed, size: 3), "batches must return something to iterate over, got int"),
        (dict(batches=lambda seed, size: iter([1, 2])), "'parabola': batches must not end: start again after the last"),
        (dict(gradients=lambda params, batch: {"y": params["x"]}), "'parabola': .*'y'"),
        (dict(gradients=lambda params, batch: {"x": np.ones(3)}), "'parabola': .*'x'"),
        (dict(gradients=lambda params, batch: 1 / 0), r"gradients failed \(.*test_run.py, line \d+\): Zero"),
    ],
)
def test_a_task_that_is_wrong_is_told_in_one_sentence(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        race(parabola(**changes), optimizers=["SGD"]).run()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(optimizers=[3]), "3 is no optimizer: it must be a rule"),
        (dict(rates={"kro": [0.1]}), "no optimizer 'kro' takes part: did you mean 'Kron'?"),
        (dict(rates={"": [0.1, -1]}), "rates of all optimizers must be positive numbers"),
        (dict(rates={"SGD": 0.1}), "rates of SGD must be positive numbers, got 0.1"),
        (dict(rates={"SGD": []}), "rates of SGD must be positive numbers"),
        (dict(seeds=0), "seeds must be a whole number from 1 on, got 0"),
    ],
)
def test_a_race_that_is_asked_for_wrongly_is_told_in_one_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        race(DIGITS, **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", "there is no task 'digit' (your own would be mymodule:task): did you mean 'digits'?"),
        (":task", "':task' is not a task: write module:attribute"),
        ("own_task.py:task", "'own_task.py' is not a module name: write it as for an import, such as mymodule:task"),
        ("nosuchmodule:task", "there is no module 'nosuchmodule' in"),
        ("json:task", "module 'json' has no 'task': it has no task at all"),
        ("json:dumps", "json:dumps: calling it failed: TypeError"),
        ("json:decoder", "json:decoder is a module and must be an ArrayTask or a ModelTask of thalweg.race"),
    ],
)
def test_a_task_that_is_not_there_is_told(name: str, words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        find_task(name)


OWN = """
import numpy as np
from thalweg.race import ArrayTask

task = ArrayTask(
    name="own",
    init=lambda seed: {"x": np.ones(3)},
    gradients=lambda params, batch: {"x": params["x"]},
    evaluate=lambda params: (params["x"] ** 2).sum(),
    steps=3,
)

def made():
    return task
"""


def test_a_task_of_your_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_one.py").write_text(OWN)
    (tmp_path / "own_task_two.py").write_text(OWN + "\n# edited\n")
    monkeypatch.chdir(tmp_path)
    first, made, other = (find_task(f"own_task_{name}") for name in ("one:task", "one:made", "two:task"))
    assert first.name == "own"
    assert first.fingerprint == made.fingerprint != ""
    assert other.fingerprint != first.fingerprint, "a task that was edited is another"
    with pytest.raises(CommandError, match="module 'own_task_one' has no 'tusk': did you mean 'task'"):
        find_task("own_task_one:tusk")
    (tmp_path / "own_task_broken.py").write_text("1 / 0")
    with pytest.raises(CommandError, match=r"own_task_broken.py, line 1"):
        find_task("own_task_broken:task")


# ---- with torch


@pytest.mark.nightly
def test_text_learns_and_repeats_itself() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    first, second = (
        next(iter(race("text", optimizers=["AdamW"], rates={"": [0.01]}, steps=6).run().records.values())).result
        for _ in range(2)
    )
    assert first == second
    assert first.loss[-1] < first.loss[0] - 1  # type: ignore[operator]
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are left alone"


@pytest.mark.nightly
def test_a_task_in_torch_of_a_few_lines_is_raced_with_everyone() -> None:
    results = race(linear()).run().summary["results"]
    assert {result["contestant"] for result in results} == {*RULES, "muon_adamw"}
    for result in results:
        assert result["loss"] < result["curve"]["loss"][0]


@pytest.mark.parametrize("engine", ["reference", "foreach"])
def test_the_engine_is_the_one_that_was_asked_for(engine: str) -> None:
    (record,) = race(linear(), optimizers=["LAMB"], rates={"": [0.1]}, engine=engine).run().records.values()
    assert record.result.engine == engine


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (dict(model=lambda seed: 3), {}, "model must return a torch.nn.Module, got int"),
        (dict(loss=lambda model, batch: 3.0), {}, "loss must return a tensor with one element, got float"),
        (dict(loss=lambda model, batch: batch["x"]), {}, "a tensor with one element, got shape (8, 4)"),
        (dict(loss=lambda model, batch: batch["x"].sum()), {}, "the backward pass of loss failed: RuntimeError"),
        (dict(loss=lambda model, batch: model(batch["x"][:, :2])), {}, "test_run.py, line"),
        (dict(), dict(device="tpu"), "there is no device 'tpu': try cpu or cuda"),
        (dict(), dict(engine="warp"), "'linear', SGD: engine must be"),
    ],
)
def test_a_task_in_torch_that_is_wrong_is_told(changes: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError, match=re.escape(words)):
        race(linear(**changes), optimizers=["SGD"], **options).run()


def test_gradients_are_clipped_together_if_the_task_says_so() -> None:
    """A step of SGD is as long as the rate times the norm."""
    torch = pytest.importorskip("torch")
    task = linear(max_grad_norm=1e-3)
    ready = race(task, optimizers=["SGD"], options={"": {"momentum": 0.0}}, rates={"": [0.5]})
    training = task.start(ready.contestants["SGD"], ready.sweeps["SGD"].first)
    params = [p for group in training.optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    training.step(1)
    moved = [(p.detach() - old).flatten() for p, old in zip(params, before, strict=True)]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.5e-3, rel=FLOAT32)
