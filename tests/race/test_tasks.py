"""The tasks: right gradients, clear words about files, modules and names that are not there."""

from __future__ import annotations

import gzip
import importlib.util
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tolerances import FINITE_DIFFERENCES, FLOAT32

from thalweg.errors import CommandError
from thalweg.race.contest import race
from thalweg.race.tasks import TASKS, resolve
from thalweg.race.tasks.valley import FUNCTIONS, Function
from thalweg.rules import RULES


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_slopes_of_the_valleys_are_those_of_their_heights(function: Function) -> None:
    for x, y in np.random.default_rng(0).uniform(-2, 2, (20, 2)).tolist():
        h = 1e-5
        numeric = (
            (function.value(x + h, y) - function.value(x - h, y)) / (2 * h),
            (function.value(x, y + h) - function.value(x, y - h)) / (2 * h),
        )
        scale = 1 + max(map(abs, numeric))
        error = np.abs(np.subtract(function.gradient(x, y), numeric)).max() / scale
        assert error < FINITE_DIFFERENCES


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_minima_of_the_valleys_are_minima_of_height_nothing_and_on_the_map(function: Function) -> None:
    for x, y in function.minima:
        assert function.value(x, y) == pytest.approx(0, abs=1e-9)
        assert np.abs(function.gradient(x, y)).max() < 1e-4
        assert function.x[0] < x < function.x[1]
        assert function.y[0] < y < function.y[1]
    assert function.value(*function.start) > 0.1


def test_the_way_down_a_valley_is_recorded_step_by_step() -> None:
    against = ["torch.optim.Adam"] if importlib.util.find_spec("torch") else []
    summary = race("valley", optimizers=["Kron"], against=against, rates={"": [0.01]}, steps=7).run().summary
    assert [course["task"] for course in summary["courses"]] == [f"valley/{f.name.lower()}" for f in FUNCTIONS]
    for course, function in zip(summary["courses"], FUNCTIONS, strict=True):
        assert len(course["results"]) == 1 + len(against)
        for result in course["results"]:
            assert len(result["path"]) == 8
            assert tuple(result["path"][0]) == function.start
            assert result["curve"]["loss"][-1] == pytest.approx(function.value(*result["path"][-1]))
        grid = course["contours"]
        row, column = 3, 5
        height = function.value(grid["x"][column], grid["y"][row])
        assert grid["value"][row][column] == pytest.approx(height, rel=0.02)
    (task, *_) = resolve("valley")
    starts = [task.init(seed)["position"].tolist() for seed in range(3)]  # type: ignore[attr-defined]
    assert starts[0] == [[-1.2], [1.0]]
    assert len({str(start) for start in starts}) == 3, "other seeds start elsewhere"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digit", "there is no task 'digit' (your own would be mymodule:task): did you mean 'digits'?"),
        ("imagenet", "task 'imagenet' (your own would be mymodule:task): there are digits, valley, text, fashion"),
        ("fashion", "task 'fashion' needs --data FOLDER"),
        (":task", "':task' is not a task: write module:attribute"),
        ("own_task.py:task", "'own_task.py' is not a module name: write it as for an import, such as mymodule:task"),
        ("./own_task:task", "'./own_task' is not a module name: write it as for an import"),
        ("nosuchmodule:task", "there is no module 'nosuchmodule' in"),
        ("json:task", "module 'json' has no 'task': it has no task at all"),
        ("json:dumps", "json:dumps: calling it failed: TypeError"),
        ("json:decoder", "json:decoder is a module and must be an ArrayTask or a ModelTask of thalweg.race"),
    ],
)
def test_a_task_that_is_not_there_is_told(name: str, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        resolve(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_are_for_the_task_that_needs_them(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--data is for the task 'fashion': 'digits' has its own"):
        resolve("digits", tmp_path)


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

class Box:
    inner = task
"""


def test_a_task_of_your_own_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task_one.py").write_text(OWN)
    (tmp_path / "own_task_two.py").write_text(OWN + "\n# edited\n")
    monkeypatch.chdir(tmp_path)
    ((first,), (made,), (inner,), (other,)) = (
        resolve(name)
        for name in ("own_task_one:task", "own_task_one:made", "own_task_one:Box.inner", "own_task_two:task")
    )
    assert first.name == "own"
    assert first.fingerprint == made.fingerprint == inner.fingerprint != ""
    assert other.fingerprint != first.fingerprint, "a task that was edited is another"
    with pytest.raises(CommandError, match="module 'own_task_one' has no 'tusk': did you mean 'task'"):
        resolve("own_task_one:tusk")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("1 / 0", "cannot be imported ("),
        ("import nosuchthing", "cannot be imported ("),
        ("def task(): raise KeyError('what')", "failed ("),
    ],
)
def test_a_module_that_fails_is_told_with_its_line(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    name = f"own_task_broken_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError) as caught:
        resolve(f"{name}:task")
    assert words in str(caught.value)
    assert f"{name}.py, line 1" in str(caught.value)


def test_every_name_of_a_task_is_offered_for_completion() -> None:
    pytest.importorskip("click")
    from thalweg.race import command

    assert tuple(TASKS) == command.TASKS


# ---- with torch


def idx(array: np.ndarray[Any, Any]) -> bytes:
    return (
        bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def write_clothes(folder: Path, *, train: int = 40, test: int = 20) -> Path:
    """The four files; labels are not gzipped."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 50, (count, 12, 12)) + 20 * labels[:, None, None]
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    return write_clothes(tmp_path)


@pytest.mark.nightly
def test_fashion_learns_from_files(clothes: Path) -> None:
    pytest.importorskip("torch.nn")
    ready = race("fashion", data=clothes, optimizers=["LAMB", "Kron"], rates={"": [0.03]}, batch_sizes=[8], steps=4)
    (course,) = ready.run().summary["courses"]
    assert course["steps"] == 64, "as many examples as four batches of 128"
    for result in course["results"]:
        assert result["loss"] < 0.9 * result["curve"]["loss"][0]
        assert 0 <= result["score"] <= 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t10k-labels-idx1-ubyte", None, "holds neither t10k-labels-idx1-ubyte nor t10k-labels-idx1-ubyte.gz"),
        ("train-labels-idx1-ubyte", b"\x00\x00\x08\x03", "is not an IDX file of bytes with 1 axes"),
        ("train-labels-idx1-ubyte", idx(np.zeros(40))[:-1], "is damaged: its shape is (40,), and 39 bytes follow"),
        ("train-labels-idx1-ubyte", idx(np.zeros(39)), "40 train images and 39 labels: the numbers must be equal"),
        ("train-labels-idx1-ubyte", idx(np.full(40, 10)), "train labels must be 0 to 9"),
        ("train-images-idx3-ubyte.gz", b"no gzip", "is damaged"),
        ("train-images-idx3-ubyte.gz", gzip.compress(bytes(100))[:-20], "is damaged"),
    ],
)
def test_damaged_files_of_fashion_are_told(clothes: Path, name: str, content: bytes | None, words: str) -> None:
    pytest.importorskip("torch.nn")
    (clothes / name).unlink()
    if content is not None:
        (clothes / name).write_bytes(content)
    with pytest.raises(CommandError) as caught:
        resolve("fashion", clothes)
    assert words in str(caught.value)


@pytest.mark.nightly
def test_text_learns_and_repeats_itself() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_rng_state()
    outcomes = [race("text", optimizers=["AdamW"], rates={"": [0.01]}, steps=6).run() for _ in range(2)]
    first, second = (next(iter(outcome.records.values())).result for outcome in outcomes)
    assert first == second
    assert first.loss[-1] < first.loss[0] - 1
    assert torch.equal(before, torch.get_rng_state()), "the caller's random numbers are left alone"


def model_task(**changes: Any) -> Any:
    torch = pytest.importorskip("torch")
    from thalweg.race import ModelTask

    def endless(seed: int, batch_size: int) -> Any:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(batch_size, 4, generator=generator)
            yield {"x": x, "y": [x.sum(1, keepdim=True)]}

    task = ModelTask(
        name="linear",
        model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.1)),
        batches=endless,
        loss=lambda model, batch: (model(batch["x"]) - batch["y"][0]).square().mean(),
        evaluate=lambda model: (model[0].weight - 1).square().sum(),
        steps=20,
        batch_size=8,
        seeds=1,
    )
    return replace(task, **changes)


@pytest.mark.nightly
def test_a_task_in_torch_of_a_few_lines_is_raced_with_everyone() -> None:
    summary = race(model_task()).run().summary
    (course,) = summary["courses"]
    assert len(course["results"]) == len(RULES)
    for result in course["results"]:
        assert result["loss"] < result["curve"]["loss"][0]
        assert list(result["layers"]["names"]) == ["0.weight", "0.bias"]
        assert (result["layers"]["trust"] is not None) == (result["contestant"] in ("LARS", "LAMB"))


def deep(seed: int) -> Any:
    """A model with a hidden matrix, whose last layer is an output layer."""
    torch = pytest.importorskip("torch")
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))


@pytest.mark.slow
def test_mixtures_race_by_name_at_the_rates_of_adamw() -> None:
    task = model_task(model=deep, rates={"AdamW": (0.01, 0.03)}, steps=2)
    asked = dict(optimizers=["AdamW", "muon_adamw", "kron_adamw"], options={"": dict(weight_decay=0.25)})
    held = race(task, **asked)  # type: ignore[arg-type]
    outcome = held.run()
    assert {(run.contestant, run.lr) for run in outcome.records} >= {
        (name, lr) for name in ("AdamW", "muon_adamw", "kron_adamw") for lr in (0.01, 0.03)
    }
    assert outcome.programme.own == []
    for name in ("muon_adamw", "kron_adamw"):
        assert "weight_decay=0.25" in outcome.programme.contestants[name]
        start = task.start(held.contestants[name], replace(held.wanted[0], lr=0.01))
        start.step()
        groups = {(group["rule"], group["lr"]) for group in start.optimizer.param_groups}
        assert groups == {(name.partition("_")[0].title(), 0.01), ("AdamW", 0.01)}


def test_the_rest_of_a_mixture_may_have_a_rate_of_its_own_on_the_same_way_down() -> None:
    task = model_task(model=deep, steps=2)
    held = race(task, optimizers=["muon_adamw"], options={"muon_adamw": dict(adamw_lr=0.002)})
    assert "adamw_lr=0.002" in held.run().programme.contestants["muon_adamw"]
    mixed = held.contestants["muon_adamw"]
    mixed = replace(mixed, options={**mixed.options, "adamw_lr": 0.002})
    start = task.start(mixed, replace(held.wanted[0], lr=0.03))
    for share in (1.0, 0.5):
        start.step()
        rates = {group["rule"]: group["lr"] for group in start.optimizer.param_groups}
        assert rates == pytest.approx({"Muon": 0.03 * share, "AdamW": 0.002 * share})


def test_what_a_mixture_cannot_do_is_told() -> None:
    with pytest.raises(CommandError, match="muon_adamw needs a model of torch"):
        race("digits", optimizers=["muon_adamw"]).run()
    with pytest.raises(
        CommandError, match="muon_adamw has no option 'nesterov': it has adamw_lr, max_grad_norm, weight_decay"
    ):
        race("digits", optimizers=["muon_adamw"], options={"muon_adamw": dict(nesterov=False)})


@pytest.mark.parametrize("engine", ["reference", "foreach"])
def test_the_engine_is_the_one_that_was_asked_for(engine: str) -> None:
    (record,) = race(model_task(), optimizers=["LAMB"], rates={"": [0.1]}, engine=engine).run().records.values()
    assert record.result.engine == engine


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        (dict(model=lambda seed: 3), {}, "model must return a torch.nn.Module, got int"),
        (dict(loss=lambda model, batch: 3.0), {}, "loss must return a tensor with one element, got float"),
        (dict(loss=lambda model, batch: batch["x"]), {}, "a tensor with one element, got shape (8, 4)"),
        (dict(loss=lambda model, batch: batch["x"].sum()), {}, "the backward pass of loss failed: RuntimeError"),
        (
            dict(model=lambda seed: __import__("torch").nn.Identity()),
            {},
            "'linear', SGD: making it failed: ValueError: optimizer got an empty",
        ),
        (dict(batches=lambda seed, size: 3), {}, "batches must return something to iterate over, got int"),
        (dict(loss=None), {}, "loss must be a function, got None"),
        (dict(), dict(device="tpu"), "there is no device 'tpu': try cpu or cuda"),
        (dict(), dict(engine="warp"), "'linear', SGD: engine must be"),
    ],
)
def test_a_task_in_torch_that_is_wrong_is_told(changes: dict[str, Any], options: dict[str, Any], words: str) -> None:
    with pytest.raises(CommandError) as caught:
        race(model_task(**changes), optimizers=["SGD"], **options).run()
    assert words in str(caught.value)


def test_an_error_within_torch_is_told_with_the_line_that_called_it() -> None:
    task = model_task(loss=lambda model, batch: model(batch["x"][:, :2]).sum())
    with pytest.raises(CommandError, match=r"loss failed \(.*test_tasks.py, line \d+\): RuntimeError: mat1 and mat2"):
        race(task, optimizers=["SGD"]).run()


def test_gradients_are_clipped_together_if_the_task_says_so() -> None:
    """A step of SGD is as long as the rate times the norm."""
    torch = pytest.importorskip("torch")
    task = model_task(max_grad_norm=1e-3)
    held = race(task, optimizers=["SGD"])
    training = task.start(replace(held.contestants["SGD"], options={}), replace(held.wanted[0], lr=0.5))
    before = training.parameters()
    training.step()
    moved = [p - before[name] for name, p in training.parameters().items()]
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.5e-3, rel=FLOAT32)


def test_other_files_are_another_task(clothes: Path) -> None:
    pytest.importorskip("torch.nn")
    (first,) = resolve("fashion", clothes)
    labels = clothes / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + b"\x09")
    (other,) = resolve("fashion", clothes)
    assert first.fingerprint != other.fingerprint, "as many pictures, and not the same"


# ---- larger tasks, for GPUs

LARGER = dict(width=16, heads=2, layers=1, context=8, train_bytes=4000, test_bytes=160, steps=4, batch_size=4)


@pytest.mark.nightly
def test_the_largest_peak_of_a_run_is_recorded_without_the_copy_that_is_compared_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from thalweg.race.model_task import ModelTraining
    from thalweg.race.tasks import text

    monkeypatch.setattr(ModelTraining, "peak_bytes", lambda training: 10 * training.steps)
    task = text.task(size=replace(text.LARGE, **LARGER))
    (record,) = race(task, optimizers=["SGD"], rates={"": [0.01]}, steps=50).run().records.values()
    assert record.result.peak_bytes == 10 * 49


@pytest.mark.nightly
def test_the_large_text_measures_text_that_it_is_not_trained_on() -> None:
    torch = pytest.importorskip("torch")
    from thalweg.race.tasks import text

    tiny = replace(text.LARGE, **LARGER)
    task = text.task(size=tiny)
    assert task.loss_name == "validation loss, nats a byte"
    whole = text.standard_library(4000 + 2 * 160)
    seen = torch.cat([next(task.batches(seed, 4)).flatten() for seed in range(50)])
    assert set(seen.tolist()) <= set(whole[:4000].tolist())
    (course,) = race(task, optimizers=["AdamW"], rates={"": [0.01]}, steps=30).run().summary["courses"]
    assert course["results"][0]["loss"] < course["results"][0]["curve"]["loss"][0]
    assert task.fingerprint != text.task(size=replace(tiny, layers=2)).fingerprint


@pytest.mark.nightly
def test_the_large_fashion_learns_and_keeps_a_twelfth_of_its_images_back(tmp_path: Path) -> None:
    pytest.importorskip("torch.nn")
    from thalweg.race.tasks import fashion

    write_clothes(tmp_path, train=48, test=20)
    task = fashion.task(tmp_path, large=True)
    assert "learns 44 pictures" in task.about
    assert task.fingerprint != fashion.task(tmp_path).fingerprint
    outcome = race(task, optimizers=["LAMB"], rates={"": [0.03]}, batch_sizes=[8], steps=1).run()
    (course,) = outcome.summary["courses"]
    assert course["loss_name"] == "validation loss"
    assert course["results"][0]["loss"] < course["results"][0]["curve"]["loss"][0]
