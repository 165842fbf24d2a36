"""Who races: rules, mixtures and optimizers of torch on equal terms, and options with clear words where they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_rules import Signed
from race_tasks import linear, parabola
from tolerances import FLOAT32, FLOAT64

from thalweg.race import ArrayTask, race
from thalweg.race.contest import Race
from thalweg.race.run import Training
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


def curves(task: Any, *names: str, lr: float = 0.05, **options: Any) -> dict[str, Any]:
    """The loss curve of everyone at one rate, by name."""
    results = race(task, optimizers=names, options={"": {"lr": lr}, **options}).run().summary["results"]
    return {result["contestant"]: result["curve"]["loss"] for result in results}


# ---- rates and equal terms


def test_grids_are_around_a_typical_rate_that_every_rule_has_or_a_default_one_or_any() -> None:
    class Tuned(Signed):
        default_lr = 0.2

    class Untuned(Signed):
        default_lr = None

    sweeps = race(parabola(), optimizers=[*RULES, Tuned, Untuned]).sweeps.values()
    rules = [rule.typical_lr for rule in RULES.values()]
    for sweep, middle in zip(sweeps, [*rules, 0.2, 0.01], strict=True):
        assert sorted(sweep.tried) == pytest.approx([middle * share for share in (0.1, 0.3, 1, 3, 10)])


def test_optimizers_of_torch_are_on_equal_terms_with_their_namesake_and_others_with_adamw() -> None:
    pytest.importorskip("torch")
    theirs = ["torch.optim.AdamW", "torch.optim.Adam", "torch.optim.SGD"]
    sweeps = race(parabola(), against=theirs).sweeps
    assert sweeps["torch.optim.Adam"].tried == sweeps["torch.optim.AdamW"].tried == sweeps["AdamW"].tried
    assert sweeps["torch.optim.SGD"].tried == sweeps["SGD"].tried
    found = {name: sweep.first.optimizer for name, sweep in sweeps.items()}
    assert found["torch.optim.AdamW"] == "torch.optim.AdamW(weight_decay=0.0)"
    assert found["torch.optim.SGD"] == "torch.optim.SGD(momentum=0.9)"
    assert "weight_decay=0.0" in found["muon_adamw"]


@pytest.mark.parametrize(("rule", "options"), [("SGD", {}), ("AdamW", {"eps": 1e-8})])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, FLOAT64), (np.float32, FLOAT32)])
def test_the_same_rule_has_the_same_curve_whoever_steps(rule: str, options: Any, dtype: Any, tolerance: float) -> None:
    pytest.importorskip("torch")
    task = parabola(init=lambda seed: {"x": np.full(4, 1.0, dtype)}, steps=20)
    theirs = f"torch.optim.{rule}"
    found = curves(task, rule, theirs, **{rule: options})
    np.testing.assert_allclose(found[theirs], found[rule], rtol=tolerance)
    assert found[rule][-1] < 0.5 * found[rule][0]


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

"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    (tmp_path / "race_factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("factories")
def test_classes_and_functions_race_groups_keep_proportions_and_averages_are_measured() -> None:
    replacing, two, tensor, mixed = (f"race_factories.{n}" for n in ("Replacing", "two_groups", "tensor_rate", "mixed"))
    plain, ours = {"momentum": 0.0}, {"averaged": 0.9, "eps": 1e-8}
    everyone = ["SGD", "race_factories:Replacing", two, tensor, "torch.optim.Adam", "AdamW", mixed]
    found = curves(TASK, *everyone, SGD=plain, AdamW=ours, **{replacing: plain})
    assert found[tensor] == pytest.approx(found["torch.optim.Adam"], rel=FLOAT32)
    assert found[two][-1] != pytest.approx(found["SGD"][-1])
    np.testing.assert_allclose(found[replacing], found["SGD"], rtol=FLOAT64)
    np.testing.assert_allclose(found[mixed], found["AdamW"], rtol=FLOAT64)
    assert curves(TASK, two, **{two: {"factor": 1.0}})[two] == pytest.approx(found["SGD"])
    assert curves(linear(), mixed)[mixed]


@pytest.mark.slow
def test_mixtures_know_the_layers_of_arrays_and_of_models() -> None:
    torch = pytest.importorskip("torch")
    deep = linear(model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    for task in (race("digits").task, deep):
        options = {"": {"averaged": 0.5}, "muon_adamw": {"adamw_lr": 0.002}}
        ready = race(task, optimizers=["muon_adamw", "kron_adamw"], options=options, steps=2)
        for sweep in ready.sweeps.values():
            assert sweep.contestant.options["averaged"] == 0.5, "what all have, mixtures have"
            groups = Training(ready.task, sweep.contestant, sweep.first).optimizer.param_groups
            first, rest = groups[0], groups[1:]
            assert first["rule"] in ("Muon", "Kron")
            assert {group["rule"] for group in rest} == {"AdamW"}
            rate = 0.002 if first["rule"] == "Muon" else first["lr"]
            assert [group["lr"] for group in rest] == [rate] * len(rest)


def test_everyone_races_once_however_they_are_written() -> None:
    pytest.importorskip("torch")
    names = [
        "SGD",
        "torch.optim.Adam",
        "sgd",
        "thalweg.torch:muon_adamw",
        "torch.optim:Adam",
        RULES["SGD"],
        "MUON_adamw",
    ]
    assert list(written(optimizers=names)) == ["SGD", "torch.optim.Adam", "muon_adamw"]


def test_runs_are_of_the_version_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    def ready() -> Race:
        return race(TASK, optimizers=["SGD", "torch.optim.Adam"], options={"": {"lr": 0.05}}, folder=tmp_path)

    assert ready().run().waiting == []
    assert ready().waiting == []
    monkeypatch.setattr(torch, "__version__", "another")
    assert [run.contestant for run in ready().waiting] == ["torch.optim.Adam"]


def test_no_framework_is_loaded_unless_somebody_needs_it_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = (
        "import sys\nfrom thalweg.race import race\n"
        "race('digits', optimizers=['SGD'], steps=1, seeds=1, options={'': {'lr': 0.1}}).run()\n"
        "assert not {'torch', 'jax', 'optax'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in ("torch.optim.Adam", "muon_adamw"):
        with pytest.raises(MissingExtra, match=r'torch is not installed: pip install "thalweg\[torch\]"'):
            race(TASK, against=[name], optimizers=["SGD"])


# ---- options


def test_an_option_for_all_goes_to_all_that_have_it_and_one_for_one_wins_and_makes_another_run(tmp_path: Path) -> None:
    asked = {"": {"eps": 1e-4, "weight_decay": 0.25}, "lamb": {"eps": 1e-5}}
    assert written(optimizers=["LAMB", "AdamW", "SGD"], options=asked) == {
        "LAMB": "LAMB(eps=1e-05, weight_decay=0.25)",
        "AdamW": "AdamW(eps=0.0001, weight_decay=0.25)",
        "SGD": "SGD(momentum=0.9, weight_decay=0.25)",
    }
    found = []
    for betas in ((0.9, 0.999), (0.1, 0.2)):
        options = {"AdamW": {"betas": betas, "lr": 0.1}}
        ready = race(parabola(), optimizers=["AdamW"], folder=tmp_path, options=options)
        assert len(ready.waiting) == 1
        found.append(ready.run().summary["results"][0]["loss"])
    assert found[0] != found[1]
