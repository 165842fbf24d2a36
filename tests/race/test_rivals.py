"""Optimizers of other libraries: the same tasks, batches, seeds and rates, and clear words where they cannot race."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lanes import by_turns
from thalweg.show.palette import COLOURS, RIVALS
from tolerances import FLOAT32, FLOAT64

from thalweg.errors import CommandError
from thalweg.race.array_task import ArrayTask
from thalweg.race.contest import load_race, race
from thalweg.race.rivals import name_references
from thalweg.show.extras import MissingExtra

TARGET = np.arange(6.0).reshape(2, 3) / 5


def gradients(params: Any, batch: None) -> Any:
    return {"x": 2 * (params["x"] - TARGET), "y": params["y"] ** 3}


TASK = ArrayTask(
    name="bowl",
    init=lambda seed: {"x": np.full((2, 3), 1.0 + seed), "y": np.linspace(-1, 1, 4)},
    gradients=gradients,
    evaluate=lambda params: float(np.square(params["x"] - TARGET).sum() + (params["y"] ** 4).sum() / 4),
    steps=20,
    seeds=2,
)
SINGLE = replace(
    TASK,
    init=lambda seed: {"x": np.full((2, 3), 1.0 + seed, np.float32), "y": np.linspace(-1, 1, 4, dtype=np.float32)},
    gradients=lambda params, batch: {n: g.astype(np.float32) for n, g in gradients(params, batch).items()},
)


def model_task() -> Any:
    torch = pytest.importorskip("torch")
    from thalweg.race.model_task import ModelTask

    def batches(seed: int, batch_size: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(batch_size, 4, generator=generator)

    def loss(model: Any, x: Any) -> Any:
        return (model(x) - x.sum(1, keepdim=True)).square().mean()

    return ModelTask(
        name="linear",
        model=lambda seed: torch.nn.Linear(4, 1),
        batches=batches,
        loss=loss,
        evaluate=lambda model: loss(model, torch.ones(2, 4)).item(),
        steps=10,
        batch_size=8,
        seeds=1,
    )


def curves(task: Any, **asked: Any) -> dict[str, Any]:
    """The loss curve of everyone at one rate, by name."""
    (course,) = race(task, rates={"": [0.05]}, **asked).run().summary["courses"]
    return {result["contestant"]: result["curve"]["loss"] for result in course["results"]}


@by_turns()
@pytest.mark.slow
@pytest.mark.parametrize(("task", "tolerance"), [(TASK, FLOAT64), (SINGLE, FLOAT32)], ids=["float64", "float32"])
@pytest.mark.parametrize(
    ("package", "theirs", "ours", "options"),
    [
        # with these options our two baselines are theirs
        ("torch", "torch.optim.SGD", "SGD", {"": {"momentum": 0.9}}),
        ("torch", "torch.optim.AdamW", "AdamW", {"": {"eps": 1e-8, "weight_decay": 0.01}}),
        ("optax", "optax.adamw", "AdamW", {"": {"eps": 1e-8, "weight_decay": 0.01}}),
    ],
)
def test_the_same_rule_has_the_same_curve_whoever_steps(
    package: str, theirs: str, ours: str, options: Any, task: Any, tolerance: float
) -> None:
    pytest.importorskip(package)
    found = curves(task, optimizers=[ours], against=[theirs], options=options)
    np.testing.assert_allclose(found[theirs], found[ours], rtol=tolerance)
    assert found[ours][-1] < 0.5 * found[ours][0]


@pytest.mark.nightly
def test_optax_steps_in_the_precision_of_the_arrays_and_leaves_that_of_others_alone() -> None:
    pytest.importorskip("optax")
    code = (
        "import numpy as np, jax.numpy as jnp\n"
        "from thalweg.race import ArrayTask, race\n"
        "task = ArrayTask(name='bowl', init=lambda seed: {'x': np.full(3, 1 / 3)}, steps=9, seeds=1,\n"
        "    gradients=lambda params, batch: {'x': params['x']}, evaluate=lambda params: params['x'].sum())\n"
        "asked = dict(rates={'': [0.1]}, options={'': {'momentum': 0.0}})\n"
        "(course,) = race(task, optimizers=['SGD'], against=['optax.sgd'], **asked).run().summary['courses']\n"
        "ours, theirs = (np.array(result['curve']['loss']) for result in course['results'])\n"
        "print(abs(ours / theirs - 1).max(), jnp.ones(1).dtype)\n"
    )
    surroundings = {**os.environ, "JAX_ENABLE_X64": "0"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=surroundings)
    error, dtype = ended.stdout.split()
    assert float(error) < FLOAT64
    assert dtype == "float32"


def test_a_task_in_torch_is_raced_on_by_optimizers_of_torch() -> None:
    task = model_task()
    asked = {"": {"eps": 1e-8, "weight_decay": 0.01}}
    found = curves(task, optimizers=["AdamW"], against=["torch.optim.AdamW", "torch.optim.RMSprop"], options=asked)
    np.testing.assert_allclose(found["torch.optim.AdamW"], found["AdamW"], rtol=FLOAT32)
    assert found["RMSprop"][-1] != found["AdamW"][-1]


@pytest.mark.slow
def test_everyone_starts_from_the_same_place_with_as_many_rates_and_seeds() -> None:
    pytest.importorskip("torch")
    ready = race(replace(TASK, steps=2), optimizers=["AdamW", "SGD"], against=["torch.optim.Adam", "torch.optim.SGD"])
    rates: dict[str, list[float]] = {}
    for run in ready.wanted:
        rates.setdefault(run.contestant, []).append(run.lr)
    assert rates["Adam"] == rates["AdamW"]
    assert rates["torch.optim.SGD"] == rates["SGD"]
    results = ready.run().summary["courses"][0]["results"]
    assert len({result["curve"]["loss"][0] for result in results}) == 1
    for asked in (dict(options={"Adam": {"lr": 0.25}}), dict(rates={"Adam": [0.25]})):
        ready = race(TASK, optimizers=["SGD"], against=["torch.optim.Adam"], **asked)  # type: ignore[arg-type]
        assert {run.lr for run in ready.wanted if run.contestant == "Adam"} == {0.25}


def test_arrays_are_stepped_in_place_or_copied_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    write(
        tmp_path,
        monkeypatch,
        "replacing_rival",
        "class Replacing(torch.optim.SGD):\n"
        "    def step(self):\n"
        "        for group in self.param_groups:\n"
        "            for p in group['params']:\n"
        "                p.data = p.data - group['lr'] * p.grad\n",
    )
    asked = {"": {"momentum": 0.0}}
    found = curves(TASK, optimizers=["SGD"], against=["replacing_rival:Replacing"], options=asked)
    np.testing.assert_allclose(found["Replacing"], found["SGD"], rtol=FLOAT64)


def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    (tmp_path / f"{name}.py").write_text(f"import torch\n{text}")
    monkeypatch.chdir(tmp_path)


FACTORIES = """
def two_groups(params, lr, factor=0.5):
    first, *rest = params
    return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": lr * factor}], lr=lr)

def tensor_rate(params, lr):
    return torch.optim.Adam(params, lr=torch.tensor(lr), foreach=False)

def nothing(params, lr):
    return 3

def no_rate(params):
    return torch.optim.SGD(params, lr=0.1)

def forgetful(params, lr):
    made = torch.optim.SGD(params, lr=lr)
    del made.param_groups[0]["lr"]
    return made

def failing(params, lr):
    raise RuntimeError("never")

text = "Adam"
"""


def test_factories_race_and_groups_keep_their_proportions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    write(tmp_path, monkeypatch, "rival_factories", FACTORIES)
    references = ["rival_factories.two_groups", "rival_factories:tensor_rate", "torch.optim.Adam"]
    found = curves(TASK, optimizers=["SGD"], against=references, options={"": {"momentum": 0.0}})
    assert found["tensor_rate"] == pytest.approx(found["Adam"], rel=FLOAT32)
    whole = curves(TASK, optimizers=["SGD"], options={"": {"momentum": 0.0}})["SGD"]
    assert found["two_groups"][-1] != pytest.approx(whole[-1])
    same = curves(
        TASK,
        optimizers=["SGD"],
        against=references[:1],
        options={"two_groups": {"factor": 1.0}, "SGD": {"momentum": 0.0}},
    )
    assert same["two_groups"] == pytest.approx(same["SGD"])


@pytest.mark.parametrize(
    ("reference", "options", "words"),
    [
        ("Adam", {}, "'Adam' is not an import name: write module.Class or module:Class, such as torch.optim.Adam"),
        ("adam.py:Adam", {}, "'adam.py' is not a module name"),
        ("torch.optim.Adm", {}, "torch.optim.Adm: module 'torch.optim' has no 'Adm': did you mean 'Adam'?"),
        ("nosuchmodule:Adam", {}, "nosuchmodule:Adam: there is no module 'nosuchmodule' in"),
        ("torch.nn.Linear", {}, "torch.nn.Linear is a class, but not an optimizer: it must be a class derived from"),
        ("torch.optim.lr_scheduler", {}, "torch.optim.lr_scheduler is a module, not an optimizer"),
        ("rival_factories:text", {}, "rival_factories:text is a str, not an optimizer"),
        ("rival_factories:no_rate", {}, "rival_factories:no_rate takes no lr: it must be"),
        (
            "torch.optim.Adam",
            {"Adam": {"weight_decy": 1}},
            "Adam has no option 'weight_decy': did you mean 'weight_decay'?",
        ),
        (
            "torch.optim.Adam",
            {"": {"amsgrd": True}},
            "no optimizer here has an option 'amsgrd': did you mean 'amsgrad'?",
        ),
        ("torch.optim.Adam", {"Adam": {"lr": 0}}, "rates of Adam must be positive numbers"),
        ("torch.optim.Adam", {"Adan": {"eps": 1}}, "there is no optimizer 'Adan': did you mean 'Adam'?"),
    ],
)
def test_what_is_no_optimizer_is_told_at_once(
    reference: str, options: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    write(tmp_path, monkeypatch, "rival_factories", FACTORIES)
    with pytest.raises(CommandError) as caught:
        race(TASK, optimizers=["SGD"], against=[reference], options=options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "options", "words"),
    [
        (
            "torch.optim.Adam",
            {"betas": 3},
            "task 'bowl', Adam (torch.optim.Adam): Adam(..., lr=0.05, betas=3) failed: TypeError",
        ),
        ("torch.optim.LBFGS", {}, "task 'bowl', LBFGS (torch.optim.LBFGS): step() failed: TypeError"),
        ("rival_factories:nothing", {}, "rival_factories.nothing returned a int, not an optimizer"),
        ("rival_factories:forgetful", {}, "rival_factories.forgetful has no lr in its groups"),
        ("rival_factories:failing", {}, "failing(..., lr=0.05) failed (/"),
        ("optax.lbfgs", {}, "update() failed: TypeError"),
        ("optax.adam", {"b1": "x"}, "task 'bowl', adam (optax.adam): "),
        ("optax.constant_schedule", {}, "optax.constant_schedule takes no lr"),
    ],
)
def test_what_fails_fails_before_anything_is_run(
    reference: str, options: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(reference.partition(".")[0] if reference.startswith("optax") else "torch")
    write(tmp_path, monkeypatch, "rival_factories", FACTORIES)
    (name,) = name_references([reference])
    with pytest.raises(CommandError) as caught:
        race(
            TASK,
            optimizers=["SGD"],
            against=[reference],
            options={name: options},
            rates={"": [0.05]},
            folder=tmp_path / "report",
        ).run(on_measure=lambda *progress: pytest.fail("something was run"))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


def test_optax_does_not_race_on_tasks_in_torch() -> None:
    pytest.importorskip("optax")
    words = "task 'linear' is in torch, and adam is of optax, which races only on tasks in numpy"
    with pytest.raises(CommandError, match=words):
        race(model_task(), optimizers=["SGD"], against=["optax.adam"]).run()


def test_a_gradient_that_does_not_fit_is_the_tasks_fault() -> None:
    pytest.importorskip("torch")
    wrong = replace(TASK, gradients=lambda params, batch: {"x": np.ones(3)})
    with pytest.raises(CommandError, match="task 'bowl': the gradient of 'x' has shape"):
        race(wrong, optimizers=["SGD"], against=["torch.optim.Adam"]).run()


def test_parameters_without_a_gradient_are_left_alone_by_torch_and_told_for_optax() -> None:
    partly = replace(TASK, gradients=lambda params, batch: {"x": gradients(params, batch)["x"], "y": None})
    pytest.importorskip("torch")
    found = curves(partly, optimizers=["SGD"], against=["torch.optim.SGD"], options={"": {"momentum": 0.0}})
    np.testing.assert_allclose(found["torch.optim.SGD"], found["SGD"], rtol=FLOAT64)
    pytest.importorskip("optax")
    with pytest.raises(CommandError, match="adam: optax needs a gradient for every parameter"):
        curves(partly, optimizers=["SGD"], against=["optax.adam"])


def test_a_rate_that_is_too_large_diverges_quietly() -> None:
    references = [name for name in ("torch.optim.SGD", "optax.sgd") if importlib.util.find_spec(name.partition(".")[0])]
    if not references:
        pytest.skip("neither torch nor optax is installed")
    ready = race(TASK, optimizers=["SGD"], against=references, rates={"": [1e30]})
    for record in ready.run().records.values():
        assert record.result.loss[-1] is None


def test_runs_of_a_rival_are_its_own_and_of_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def ready() -> Any:
        asked: dict[str, Any] = dict(optimizers=["SGD"], rates={"": [0.05]}, seeds=1, folder=tmp_path)
        return race(TASK, against=["torch.optim.Adam"], options={"Adam": {"eps": 1e-6}}, **asked)

    summary = ready().run().summary
    assert ready().waiting == []
    looks = {who["name"]: who for who in summary["contestants"]}
    assert (looks["Adam"]["colour"], looks["Adam"]["rival"], looks["SGD"]["rival"]) == (RIVALS[0], True, False)
    assert looks["Adam"]["options"] == "torch.optim.Adam(eps=1e-06)"
    assert not set(RIVALS) & set(COLOURS.values())
    again, _ = load_race(tmp_path)
    assert {**again.summary, "made": ""} == {**summary, "made": ""}
    last = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[-1])
    assert last["run"]["optimizer"] == "torch.optim.Adam(eps=1e-06)"
    assert last["result"]["engine"] == "torch"
    assert last["result"]["state_bytes"] >= 2 * 8 * last["result"]["parameters"]
    monkeypatch.setattr(torch, "__version__", "another")
    assert {run.contestant for run in ready().waiting} == {"Adam"}


def test_names_are_short_where_nobody_else_has_them() -> None:
    references = ["torch.optim.Adam", "optax.adam", "timm.optim.Lamb", "mine:Sharp", "torch.optim.SGD"]
    assert list(name_references(references)) == [
        "torch.optim.Adam",
        "optax.adam",
        "timm.optim.Lamb",
        "Sharp",
        "torch.optim.SGD",
    ]
    assert list(name_references(["optax.adam", "optax.adam", "optax:adam"])) == ["adam"]


def test_a_package_races_with_all_that_is_like_those_who_take_part() -> None:
    pytest.importorskip("torch")
    ours = ["AdamW", "SGD", "LAMB"]
    ready = race(TASK, optimizers=ours, against=["torch.optim.Adam", "torch"], rates={"torch.SGD": [0.5]})
    theirs = {name: str(each) for name, each in ready.contestants.items() if name not in ours}
    assert theirs == {
        "Adam": "torch.optim.Adam()",
        "torch.SGD": "torch.optim.SGD(momentum=0.9)",
        "torch.AdamW": "torch.optim.AdamW(weight_decay=0.0)",
    }
    rates = {name: {run.lr for run in ready.wanted if run.contestant == name} for name in ready.contestants}
    assert rates["torch.SGD"] == {0.5}
    assert rates["torch.AdamW"] == rates["AdamW"]
    with pytest.raises(CommandError, match="torch has SGD, AdamW, Adafactor, of which none takes part"):
        race(TASK, optimizers=["Kron"], against=["torch"])


def test_a_package_that_is_not_installed_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("thalweg.race.rivals.is_installed", lambda package: False)
    with pytest.raises(
        CommandError, match="kron_torch is not installed, and --against asks for it: pip install kron-torch"
    ):
        race(TASK, against=["kron-torch"])


@pytest.mark.nightly
def test_timm_races_without_torchvision() -> None:
    pytest.importorskip("torch")
    if importlib.util.find_spec("timm") is None:
        pytest.skip("needs timm")
    code = (
        "from thalweg.race.contest import race\n"
        "ready = race('digits', optimizers=['LAMB'], against=['timm'], steps=2, seeds=1, rates={'': [0.01]})\n"
        "ours, theirs = ready.run().summary['courses'][0]['results']\n"
        "assert {ours['contestant'], theirs['contestant']} == {'LAMB', 'timm.Lamb'}\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, extra in (("torch", "torch"), ("optax", "jax")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtra, match=rf'{package} is not installed: pip install "thalweg\[{extra}\]"'):
            race(TASK, against=[f"{package}.optim.Adam"])


def test_no_framework_is_loaded_unless_a_rival_needs_it() -> None:
    code = (
        "import sys\nfrom thalweg.race.contest import race\n"
        "race('digits', optimizers=['SGD'], steps=1, seeds=1, rates={'': [0.1]}).run()\n"
        "assert not {'torch', 'jax', 'optax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


OWN_MIXTURE = """
import torch

def half_and_half(model, lr, momentum=0.0):
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.SGD([{"params": weights}, {"params": rest, "lr": lr / 10}], lr=lr, momentum=momentum)

def nothing(model, lr):
    return None
"""


@pytest.mark.nightly
def test_a_function_of_ones_own_races_as_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    from thalweg.cli import run

    (tmp_path / "own_mixture.py").write_text(OWN_MIXTURE)
    monkeypatch.chdir(tmp_path)
    own = ["race", "text", "--optimizers", "own_mixture:half_and_half,muon_adamw", "--lr", "0.02", "--steps", "2"]
    asked = ["--option", "half_and_half.momentum=0.5", "--json", "--out", "out"]
    assert run([*own, *asked]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["contestants"][0]["options"] == "half_and_half(momentum=0.5)"
    assert {result["contestant"] for result in summary["courses"][0]["results"]} == {"half_and_half", "muon_adamw"}
    assert run(["race", "--redraw", "--out", "out"]) == 0
    assert run([*own, "--option", "half_and_half.momentun=0.5", "--out", "out"]) == 1
    assert "did you mean" in capsys.readouterr().err
    assert run(["race", "text", "--optimizers", "own_mixture:nothing", "--lr", "0.02", "--out", "no"]) == 1
    assert "must return an optimizer of torch" in capsys.readouterr().err
