"""Who races: rules, mixtures and optimizers of torch on equal terms, with options; and whatever cannot race."""

from __future__ import annotations

import re
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_rules import Signed
from race_tasks import linear, parabola
from tolerances import FLOAT32, FLOAT64

from thalweg.errors import CommandError
from thalweg.race import race
from thalweg.race.run import Training
from thalweg.rules import RULES
from thalweg.show.extras import MissingExtra

LAYER = parabola(
    init=lambda seed: {"first.weight": np.full((2, 3), 2.0), "first.bias": np.linspace(-1, 1, 4)},
    gradients=lambda params, batch: {name: 2 * p for name, p in params.items()},
    evaluate=lambda params: sum(float(np.square(p).sum()) for p in params.values()),
    steps=20,
)


def curves(task: Any, *names: str, **options: Any) -> dict[str, Any]:
    """The loss curve of everyone at one rate, by name."""
    results = race(task, optimizers=names, options={"": {"lr": 0.05}, **options}).run().summary["results"]
    return {result["contestant"]: result["curve"]["loss"] for result in results}


def test_grids_are_around_a_typical_rate_that_every_rule_has_or_a_default_one_or_any() -> None:
    own = [type("Own", (Signed,), {"default_lr": lr, "__qualname__": f"Own{lr}"}) for lr in (0.2, None)]
    sweeps = race(parabola(), optimizers=[*RULES, *own]).sweeps.values()
    rules = [rule.typical_lr for rule in RULES.values()]
    for sweep, middle in zip(sweeps, [*rules, 0.2, 0.01], strict=True):
        assert sorted(sweep.tried) == pytest.approx([middle * share for share in (0.1, 0.3, 1, 3, 10)])


def test_optimizers_of_torch_are_on_equal_terms_with_their_namesake_and_others_with_adamw() -> None:
    pytest.importorskip("torch")
    theirs = ["torch.optim.AdamW", "torch.optim.SGD", "torch.optim.Adam"]
    sweeps = race(parabola(), against=theirs).sweeps
    for other, ours in zip(theirs, ("AdamW", "SGD", "AdamW"), strict=True):
        assert sweeps[other].tried == sweeps[ours].tried
    for name, options in (("AdamW", "weight_decay=0.0"), ("SGD", "momentum=0.9")):
        assert sweeps[name].first.optimizer == f"{name}({options})"
        assert sweeps[f"torch.optim.{name}"].first.optimizer == f"torch.optim.{name}({options})"
    assert "weight_decay=0.0" in sweeps["muon_adamw"].first.optimizer


@pytest.mark.parametrize(
    ("rule", "package", "options"),
    [
        ("SGD", "torch.optim", {}),
        ("AdamW", "torch.optim", {"eps": 1e-8}),
        ("AdamW", "thalweg.torch", {"averaged": 0.9}),
    ],
)
def test_the_same_rule_has_the_same_curve_whoever_steps(rule: str, package: str, options: Any) -> None:
    pytest.importorskip("torch")
    theirs = f"{package}.{rule}"
    ours, found = curves(parabola(steps=20), rule, theirs, **{rule: options, theirs: options}).values()
    np.testing.assert_allclose(ours, found, rtol=FLOAT64)
    assert ours[-1] < 0.5 * ours[0]


def test_classes_and_functions_race_and_groups_keep_their_proportions() -> None:
    pytest.importorskip("torch")
    replacing, groups, tensor = (f"race_factories.{name}" for name in ("Replacing", "groups", "tensor"))
    plain = {"momentum": 0.0}
    everyone = ["SGD", "race_factories:Replacing", groups, tensor, "torch.optim.Adam"]
    found = curves(LAYER, *everyone, SGD=plain, **{replacing: plain})
    assert found[tensor] == pytest.approx(found["torch.optim.Adam"], rel=FLOAT32)
    assert found[groups][-1] != pytest.approx(found["SGD"][-1])
    np.testing.assert_allclose(found[replacing], found["SGD"], rtol=FLOAT64)
    assert curves(LAYER, groups, **{groups: {"factor": 1.0}})[groups] == pytest.approx(found["SGD"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon_adamw", "kron_adamw"])
def test_mixtures_know_the_layers_of_arrays_and_of_models_and_have_what_all_have(name: str) -> None:
    torch = pytest.importorskip("torch")
    deep = linear(model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    for task in (race("digits").task, deep):
        ready = race(task, optimizers=[name], options={"": {"averaged": 0.5}, name: {"adamw_lr": 0.002}})
        (sweep,) = ready.sweeps.values()
        assert sweep.contestant.options["averaged"] == 0.5
        first, *rest = Training(ready.task, sweep.contestant, sweep.first).optimizer.param_groups
        assert first["rule"].lower() == name.partition("_")[0]
        assert {(group["rule"], group["lr"]) for group in rest} == {("AdamW", 0.002)}


def test_everyone_races_once_however_they_are_written() -> None:
    pytest.importorskip("torch")
    names = ["SGD", "torch.optim.Adam", "sgd", "thalweg.torch:muon_adamw", "torch.optim:Adam", "MUON_adamw"]
    names += [RULES["SGD"]]
    assert list(race(parabola(), optimizers=names).sweeps) == ["SGD", "torch.optim.Adam", "muon_adamw"]


def test_runs_are_of_the_version_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    asked: dict[str, Any] = dict(optimizers=["SGD", "torch.optim.Adam"], options={"": {"lr": 0.05}}, folder=tmp_path)
    assert race(LAYER, **asked).run().waiting == race(LAYER, **asked).waiting == []
    monkeypatch.setattr(torch, "__version__", "another")
    assert [run.contestant for run in race(LAYER, **asked).waiting] == ["torch.optim.Adam"]


def test_a_framework_that_is_missing_is_named_and_rules_race_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("torch.optim.Adam", "muon_adamw"):
        with pytest.raises(MissingExtra, match=r'torch is not installed: pip install "thalweg\[torch\]"'):
            race(LAYER, optimizers=["SGD", name])
    assert curves(LAYER, "SGD", "LAMB")


def test_an_option_for_all_goes_to_all_that_have_it_and_one_for_one_wins_and_makes_another_run(tmp_path: Path) -> None:
    asked = {"": {"eps": 1e-4, "weight_decay": 0.25}, "lamb": {"eps": 1e-5}}
    sweeps = race(parabola(), optimizers=["LAMB", "SGD"], options=asked).sweeps
    assert sweeps["LAMB"].first.optimizer == "LAMB(eps=1e-05, weight_decay=0.25)"
    assert sweeps["SGD"].first.optimizer == "SGD(momentum=0.9, weight_decay=0.25)"
    found = set()
    for betas in ((0.9, 0.999), (0.1, 0.2)):
        ready = race(parabola(), optimizers=["AdamW"], folder=tmp_path, options={"AdamW": {"betas": betas, "lr": 0.1}})
        assert len(ready.waiting) == 1
        found.add(ready.run().summary["results"][0]["loss"])
    assert len(found) == 2


# ---- what is wrong is told in one sentence, before anything is run or written


ZERO = r"failed \(.*test_contestants.py, line \d+\): Zero"
ABOUT_A_RATE = "lr must be a positive number, or several, got"
TASKS: list[tuple[Any, dict[str, Any], str]] = [
    (parabola, dict(steps=0), "'parabola': steps must be a whole number from 1 on, got 0"),
    (parabola, dict(target="low"), "target must be a number, a loss, got 'low'"),
    (parabola, dict(best_score="all"), "best_score must be 'most' or 'least', got 'all'"),
    (parabola, dict(warm_up=1), "warm_up must be a share of the steps below 1, got 1"),
    (parabola, dict(init=3), "init must be a function, got 3"),
    (parabola, dict(init=lambda seed: {"x": [1.0]}), "init must return arrays by name, and 'x' is a list"),
    (parabola, dict(evaluate=lambda params: float("nan")), "the loss before the first step is nan"),
    (parabola, dict(evaluate=lambda params: (1, 2, 3)), "must return a loss, or a loss and a score, got tuple"),
    (parabola, dict(batches=lambda seed, size: 3), "batches must return something to iterate over, got int"),
    (parabola, dict(batches=lambda seed, size: iter([])), "batches must not end: start again after the last"),
    (parabola, dict(gradients=lambda params, batch: {"y": np.ones(4)}), "'parabola'.*y"),
    (parabola, dict(gradients=lambda params, batch: {"x": np.ones(3)}), "'parabola'.*'x'"),
    (parabola, dict(gradients=lambda params, batch: 1 / 0), ZERO),
    (linear, dict(model=lambda seed: 3), "model must return a torch.nn.Module, got int"),
    (linear, dict(loss=lambda model, batch: 3.0), "loss must return a tensor with one element, got float"),
    (linear, dict(loss=lambda model, batch: batch["x"]), r"tensor with one element, got shape \(8, 4\)"),
    (linear, dict(loss=lambda model, batch: batch["x"].sum()), "the backward pass of loss failed"),
]
ASKED: list[tuple[dict[str, Any], str]] = [
    (dict(beyond=-1), "beyond must be a whole number from 0 on, got -1"),
    (dict(optimizers=[3]), "3 is no optimizer: it must be a rule"),
    (dict(options={"": {"momentun": 1}}), "no optimizer here has an option 'momentun': did you mean"),
    (dict(options={"": {"engine": "warp"}}), "'parabola', SGD: engine must be one of 'auto', 'ref"),
    (dict(options={"kron": {"clip": 1}}), "no optimizer 'kron' takes part: there are SGD, LAMB"),
    (dict(options={"LAMB": 3}), "options of LAMB must be a dict, got 3"),
    (dict(options={"LAMB": {"stacked_axes": 3}}), "stacked_axes=3"),
    (dict(options={"": {"lr": [0.1, -1]}}), rf"SGD: {ABOUT_A_RATE} \[0"),
    (dict(options={"lamb": {"lr": "fast"}}), f"LAMB: {ABOUT_A_RATE} 'f"),
]
IMPORTED = [
    ("digit", "SGD", "there is no task 'digit' (your own would be mymodule:task): did you mean 'digits'?"),
    ("race_tasks:parobola", "SGD", "module 'race_tasks' has no 'parobola': "),
    ("race_tasks:bowl", "SGD", "race_tasks:bowl: calling it failed: TypeError"),
    ("race_tasks:math", "SGD", "race_tasks:math is a module and must be an ArrayTask or a ModelTask of thalweg"),
    ("race_tasks:parabola", "Adam", "no optimizer 'Adam' (others go by import path, such as torch.optim.Adam)"),
    ("race_tasks:parabola", "race_tasks:math", "'race_tasks:math' is no optimizer: it must be a rule"),
    ("race_tasks:misnamed", "torch.optim.SGD", "task 'parabola': the gradient of 'y' failed"),
    ("race_tasks:parabola", "torch.nn.Linear", "'parabola', torch.nn.Linear: making it with lr=0.05 failed"),
    ("race_tasks:parabola", "torch.optim.LBFGS", "'parabola', torch.optim.LBFGS: step() failed"),
    ("race_tasks:parabola", "race_factories:nothing", "it returned a int, and must return an optimizer of torch"),
    ("race_tasks:parabola", "race_factories:forgetful", "it has no lr in its groups, and the race must lower it step"),
]


NEEDS_TORCH = pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
MISTAKES = [
    *((partial(make, **changes), {}, words) for make, changes, words in TASKS),
    *((parabola, asked, words) for asked, words in ASKED),
    *(
        pytest.param(task, dict(optimizers=[name], options={"": {"lr": 0.05}}), re.escape(words), marks=NEEDS_TORCH)
        for task, name, words in IMPORTED
    ),
]


@pytest.mark.parametrize(("task", "asked", "words"), MISTAKES)
def test_such_a_mistake(task: Any, asked: dict[str, Any], words: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"optimizers": ["SGD", "LAMB"], "folder": tmp_path / "report", **asked}
    with pytest.raises(CommandError, match=words) as caught:
        race(task() if callable(task) else task, **given).run(lambda run: pytest.fail("something was run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report").exists()
