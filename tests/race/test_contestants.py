"""Who races: rules, mixtures and optimizers of torch on equal terms, and options with clear words where they fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_rules import Signed
from race_tasks import linear, parabola
from tolerances import FLOAT32, FLOAT64

from thalweg.errors import CommandError
from thalweg.race import ArrayTask, race
from thalweg.rules import RULES
from thalweg.show.extras import MissingExtra

TARGET = np.arange(6.0).reshape(2, 3) / 5
#: Of arrays whose names are those of layers.
TASK = ArrayTask(
    name="bowl",
    init=lambda seed: {"first.weight": np.full((2, 3), 1.0 + seed), "first.bias": np.linspace(-1, 1, 4)},
    gradients=lambda params, batch: {
        "first.weight": 2 * (params["first.weight"] - TARGET),
        "first.bias": params["first.bias"] ** 3,
    },
    evaluate=lambda params: float(np.square(params["first.weight"] - TARGET).sum() + (params["first.bias"] ** 4).sum()),
    steps=20,
    seeds=1,
)


def written(**asked: Any) -> dict[str, str]:
    """Who takes part, as it is recorded."""
    return {name: sweep.first.optimizer for name, sweep in race(parabola(), **asked).sweeps.items()}


def curves(task: Any, rate: float = 0.05, **asked: Any) -> dict[str, Any]:
    """The loss curve of everyone at one rate, by name."""
    results = race(task, rates={"": [rate]}, **asked).run().summary["results"]
    return {result["contestant"]: result["curve"]["loss"] for result in results}


# ---- rates and equal terms


def test_every_rule_has_a_typical_rate_and_its_grid_is_around_it() -> None:
    ready = race(parabola(), optimizers=list(RULES))
    for name, rule in RULES.items():
        assert rule.typical_lr is not None, name
        assert ready.sweeps[name].grid == pytest.approx([rule.typical_lr * share for share in (0.1, 0.3, 1, 3, 10)])


def test_a_rule_of_ones_own_is_swept_around_its_default_or_any_rate() -> None:
    class Tuned(Signed):
        default_lr = 0.2

    class Untuned(Signed):
        default_lr = None

    ready = race(parabola(), optimizers=[Tuned, Untuned])
    tuned, untuned = ready.sweeps.values()
    assert (tuned.grid[2], untuned.grid[2]) == (0.2, 0.01)


def test_nobody_decays_and_nobody_is_without_momentum() -> None:
    pytest.importorskip("torch")
    found = written(against=["torch.optim.AdamW", "torch.optim.SGD"])
    assert found["AdamW"] == "AdamW(weight_decay=0.0)"
    assert found["torch.optim.AdamW"] == "torch.optim.AdamW(weight_decay=0.0)"
    assert (found["SGD"], found["torch.optim.SGD"]) == ("SGD(momentum=0.9)", "torch.optim.SGD(momentum=0.9)")
    assert "weight_decay=0.0" in found["muon_adamw"]
    assert not [name for name in found if re.search("weight_decay=[^0]", found[name])]


@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_the_same_rule_has_the_same_curve_whoever_steps(rule: str, dtype: Any) -> None:
    pytest.importorskip("torch")
    task = parabola(init=lambda seed: {"x": np.full(4, 1.0, dtype)}, steps=20)
    theirs = f"torch.optim.{rule}"
    found = curves(task, optimizers=[rule], against=[theirs], options={"AdamW": {"eps": 1e-8}} if rule != "SGD" else {})
    np.testing.assert_allclose(found[theirs], found[rule], rtol=FLOAT64 if dtype is np.float64 else FLOAT32)
    assert found[rule][-1] < 0.5 * found[rule][0]


def test_optimizers_of_torch_get_the_rates_of_their_namesake_or_of_adamw() -> None:
    pytest.importorskip("torch")
    sweeps = race(parabola(), optimizers=["AdamW", "SGD"], against=["torch.optim.Adam", "torch.optim.SGD"]).sweeps
    assert sweeps["torch.optim.Adam"].grid == sweeps["AdamW"].grid
    assert sweeps["torch.optim.SGD"].grid == sweeps["SGD"].grid


# ---- from elsewhere

FACTORIES = """
import torch
from thalweg.torch import AdamW

class Replacing(torch.optim.SGD):
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data - group["lr"] * p.grad

def two_groups(params, lr, factor=0.5):
    first, *rest = params
    return torch.optim.SGD([{"params": [first]}, {"params": rest, "lr": lr * factor}], lr=lr)

def tensor_rate(params, lr):
    return torch.optim.Adam(params, lr=torch.tensor(lr), foreach=False)

def mixed(model, lr, eps=1e-8, **more):
    assert isinstance(model, torch.nn.Module)
    return AdamW(model.named_parameters(), lr=lr, eps=eps, weight_decay=0.0, averaged=0.9)

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


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "race_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("factories")
def test_factories_race_and_groups_keep_their_proportions() -> None:
    replacing, two_groups, tensor_rate = (
        f"race_factories.{name}" for name in ("Replacing", "two_groups", "tensor_rate")
    )
    plain = {"SGD": {"momentum": 0.0}}
    others = ["race_factories:Replacing", two_groups, tensor_rate, "torch.optim.Adam"]
    found = curves(TASK, optimizers=["SGD"], against=others, options={**plain, replacing: {"momentum": 0.0}})
    assert found[tensor_rate] == pytest.approx(found["torch.optim.Adam"], rel=FLOAT32)
    assert found[two_groups][-1] != pytest.approx(found["SGD"][-1])
    np.testing.assert_allclose(found[replacing], found["SGD"], rtol=FLOAT64)
    same = curves(TASK, optimizers=["SGD", two_groups], options={**plain, two_groups: {"factor": 1.0}})
    assert same[two_groups] == pytest.approx(same["SGD"])


@pytest.mark.usefixtures("factories")
def test_functions_get_the_model_and_averages_are_what_is_measured() -> None:
    ours, mixed = {"AdamW": {"averaged": 0.9, "eps": 1e-8}}, "race_factories.mixed"
    found = curves(TASK, optimizers=["AdamW", mixed], options=ours)
    np.testing.assert_allclose(found[mixed], found["AdamW"], rtol=FLOAT64)
    assert curves(linear(), optimizers=[mixed])[mixed]


@pytest.mark.slow
def test_mixtures_know_the_layers_of_arrays_and_of_models() -> None:
    torch = pytest.importorskip("torch")
    deep = linear(model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    for task in (race("digits").task, deep):
        ready = race(
            task, optimizers=["muon_adamw", "kron_adamw"], options={"muon_adamw": {"adamw_lr": 0.002}}, steps=2
        )
        for name, rate in (("muon_adamw", 0.002), ("kron_adamw", 0.03)):
            ready = race(task, optimizers=[name], steps=2, rates={"": [0.03]}, options={name: {"adamw_lr": rate}})
            training = task.start(ready.contestants[name], ready.sweeps[name].first)
            training.step(1)
            made = getattr(training.optimizer, "optimizer", training.optimizer)
            rates = {group["rule"]: group["lr"] for group in made.param_groups}
            assert rates == pytest.approx({name.partition("_")[0].title(): 0.03, "AdamW": rate})


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("Adam", "there is no optimizer 'Adam' (others go by import path, such as torch.optim.Adam)"),
        ("adam.py:Adam", "'adam.py' is not a module name"),
        ("torch.optim.Adm", "torch.optim.Adm: module 'torch.optim' has no 'Adm': did you mean 'Adam'?"),
        ("nosuchmodule:Adam", "nosuchmodule:Adam: there is no module 'nosuchmodule' in"),
        ("torch.nn.Linear", "torch.nn.Linear: making it with lr=0.05 failed: TypeError"),
        ("race_factories:text", "race_factories:text is a str, and no optimizer"),
        (
            "race_factories:no_rate",
            "making it with lr=0.05 failed: TypeError: no_rate() got an unexpected keyword argument",
        ),
        ("torch.optim.LBFGS", "task 'bowl', torch.optim.LBFGS: step() failed: TypeError"),
        (
            "race_factories:nothing",
            "race_factories.nothing: it returned a int, and must return an optimizer of torch",
        ),
        ("race_factories:forgetful", "it has no lr in its groups, and the race must lower it step by step"),
        ("race_factories:failing", "making it with lr=0.05 failed ("),
    ],
)
def test_what_is_no_optimizer_is_told_before_anything_is_run(reference: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError) as caught:
        race(TASK, optimizers=["SGD", reference], rates={"": [0.05]}, folder=tmp_path / "report").run(
            on_measure=lambda *progress: pytest.fail("something was run")
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()


def test_everyone_races_once_however_they_are_written() -> None:
    pytest.importorskip("torch")
    references = ["SGD", "torch.optim.Adam", "torch.optim.SGD", "sgd", "torch.optim:Adam"]
    assert list(written(optimizers=references)) == ["SGD", "torch.optim.Adam", "torch.optim.SGD"]


def test_runs_are_of_the_version_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def ready() -> Any:
        asked: dict[str, Any] = dict(optimizers=["SGD"], rates={"": [0.05]}, folder=tmp_path)
        return race(TASK, against=["torch.optim.Adam"], options={"torch.optim.adam": {"eps": 1e-6}}, **asked)

    summary = ready().run().summary
    assert ready().waiting == []
    who = {who["name"]: who for who in summary["contestants"]}
    assert who["torch.optim.Adam"]["options"] == "torch.optim.Adam(eps=1e-06)"
    monkeypatch.setattr(torch, "__version__", "another")
    assert {run.contestant for run in ready().waiting} == {"torch.optim.Adam"}


def test_no_framework_is_loaded_unless_somebody_needs_it_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import sys\nfrom thalweg.race import race\n"
        "race('digits', optimizers=['SGD'], steps=1, seeds=1, rates={'': [0.1]}).run()\n"
        "assert not {'torch', 'jax', 'optax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtra, match=r'torch is not installed: pip install "thalweg\[torch\]"'):
        race(TASK, against=["torch.optim.Adam"])


# ---- options


def test_an_option_for_all_goes_to_all_that_have_it_and_one_for_one_wins() -> None:
    asked = {"": {"eps": 1e-4, "weight_decay": 0.25}, "lamb": {"eps": 1e-5}}
    found = written(optimizers=["LAMB", "AdamW", "SGD"], options=asked)
    assert found == {
        "LAMB": "LAMB(eps=1e-05, weight_decay=0.25)",
        "AdamW": "AdamW(eps=0.0001, weight_decay=0.25)",
        "SGD": "SGD(momentum=0.9, weight_decay=0.25)",
    }


def test_options_change_what_is_computed_and_are_other_runs(tmp_path: Path) -> None:
    def ready(**asked: Any) -> Any:
        return race(parabola(), optimizers=["AdamW"], rates={"": [0.1]}, folder=tmp_path, **asked)

    plain = ready().run().summary["results"]
    asked = ready(options={"AdamW": {"betas": (0.1, 0.2)}})
    assert len(asked.waiting) == 1
    summary = asked.run().summary
    assert summary["results"][0]["loss"] != plain[0]["loss"]
    assert summary["contestants"][0]["options"] == "AdamW(betas=(0.1, 0.2), weight_decay=0.0)"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"LAMB": {"weight_decy": 1}}, "LAMB has no option 'weight_decy': did you mean 'weight_decay'?"),
        ({"LAMB": {"betas": (0.9, 1.5)}}, "'parabola', LAMB: betas"),
        ({"SGD": {"weight_decay": -1}}, "SGD: weight_decay must be a finite number >= 0, got -1"),
        ({"": {"weight_decay": "much"}}, "SGD: weight_decay must be a finite number >= 0, got 'much'"),
        ({"": {"betas": (0.5, 0.6)}}, "AdEMAMix: betas must be 3 numbers, got (0.5, 0.6)"),
        ({"": {"momentun": 1}}, "no optimizer here has an option 'momentun': did you mean 'momentum'?"),
        ({"SGD": {"momentum": 0.0, "nesterov": True}}, "nesterov=True has no effect"),
        ({"kron": {"clip": 1}}, "no optimizer 'kron' takes part: there are SGD, LAMB, AdEMAMix"),
        ({"LAMB": 3}, "options of LAMB must be a dict, got 3"),
        ({"LAMB": {"lr": 0.1}}, "the learning rate is not an option: say which rates to try, by rates= or --lr"),
        ({"LAMB": {"variant": "none"}}, "LAMB: variant must be one of 'paper', 'optax'"),
        ({"": {"variant": "paper"}}, "SGD: variant must be one of 'torch', 'optax', got 'paper'"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_runs(options: Any, words: str) -> None:
    with pytest.raises(CommandError) as caught:
        race(parabola(), optimizers=["SGD", "LAMB", "AdEMAMix"], options=options).run(
            on_measure=lambda *progress: pytest.fail("something was run")
        )
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_model_refuses_is_told_before_anything_runs(tmp_path: Path) -> None:
    asked = {"LAMB": {"stacked_axes": 1}, "Kron": {"stacked_axes": 3}}
    ready = race(parabola(), optimizers=["LAMB", "Kron"], options=asked, folder=tmp_path / "report")
    with pytest.raises(CommandError, match="stacked_axes=3"):
        ready.run(on_measure=lambda *progress: pytest.fail("something was run"))
    assert list(tmp_path.iterdir()) == []
