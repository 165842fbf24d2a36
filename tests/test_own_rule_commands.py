"""A rule of one's own on the command line: every verb takes it, as a class or as ``module:MyRule``."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from own_rules import Signed, every

from thalweg import Rule
from thalweg.errors import CommandError
from thalweg.plan import plan
from thalweg.race import ArrayTask, ModelTask, race
from thalweg.show.arguments import Given

#: A model of a matrix and a vector.
ELEMENTS = 60 * 40 + 60


def small_model() -> Any:
    return pytest.importorskip("torch").nn.Linear(40, 60)


@every
def test_plan(rule: type[Rule]) -> None:
    (cost,) = plan(small_model(), optimizers=[rule]).optimizers
    assert cost.state_bytes == 4 * ELEMENTS + 4 * 2
    assert cost.moved_bytes >= 20 * ELEMENTS  # reads p, g and m, and writes p and m
    assert rule.__name__ not in [each.optimizer for each in plan(small_model()).optimizers]  # nobody else asked for it


@every
def test_plans_of_shards(rule: type[Rule]) -> None:
    (cost,) = plan(small_model(), optimizers=[rule], world=2).optimizers
    assert cost.state_bytes == 4 * (30 * 40 + 30) + 4 * 2


def test_a_rule_that_is_called_like_one_of_the_package_has_its_module_in_front() -> None:
    rule = type("LAMB", (Signed,), {"__module__": "mine"})
    options = [Given("lamb", "momentum_dtype", "bfloat16"), Given("mine:LAMB", "signed", False)]
    costs = plan(small_model(), optimizers=["lamb", rule, rule], options=options).optimizers
    assert [cost.optimizer for cost in costs] == ["LAMB", "mine:LAMB"]
    assert costs[1].state_bytes == 4 * ELEMENTS + 4 * 2


@every
def test_its_temporaries_are_fewer_than_it_tells(rule: type[Rule]) -> None:
    from measured_peaks import allocator_peak

    torch = pytest.importorskip("torch")
    from thalweg.torch import optimizer as of_torch

    params = [torch.nn.Parameter(torch.randn(shape)) for shape in [(600, 700), (300, 500), (90,)]]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = of_torch(rule)(params, lr=1e-3, engine="foreach")
    assert 2**20 < allocator_peak(optimizer.step, warm_up=1) <= optimizer.explain().temporary_bytes


def parabola() -> ArrayTask:
    return ArrayTask(
        name="parabola",
        init=lambda seed: {"x": np.random.default_rng(seed).normal(size=(3, 4))},
        gradients=lambda params, batch: {"x": 2 * params["x"]},
        evaluate=lambda params: np.square(params["x"]).sum(),
        steps=5,
    )


@every
def test_a_race_in_numpy(rule: type[Rule]) -> None:
    summary = race(parabola(), optimizers=[rule, "LAMB"], seeds=1).run().summary
    assert {result["contestant"] for result in summary["results"]} == {f"{rule.__module__}.{rule.__qualname__}", "LAMB"}
    assert json.dumps(summary)


def test_a_race_in_torch() -> None:
    torch = pytest.importorskip("torch")

    def batches(seed: int, batch_size: Any) -> Iterator[Any]:
        while True:
            yield torch.ones(2, 3)

    task = ModelTask(
        name="line",
        model=lambda seed: torch.nn.Linear(3, 1),
        batches=batches,
        loss=lambda model, batch: model(batch).square().mean(),
        evaluate=lambda model: model(torch.ones(1, 3)).square().item(),
        steps=3,
    )
    summary = race(task, optimizers=[Signed], seeds=1, options={"": {"lr": 0.01}}).run().summary
    assert [result["contestant"] for result in summary["results"]] == [f"{Signed.__module__}.Signed"]


def test_explain() -> None:
    (cost,) = plan(small_model(), optimizers=[Signed]).optimizers
    rows = cost.explanation.rows
    assert [row.state_bytes for row in rows] == [4 * 2400 + 4, 4 * 60 + 4]
    assert "exp_avg" not in str(rows[0].warnings)


class TestByReference:
    """``module:MyRule``, as the command line has it, in the current folder too."""

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        source = inspect.getsource(Signed).replace("class Signed", "class Spelt")
        (tmp_path / "spelt_rules.py").write_text(
            "from dataclasses import dataclass\nfrom typing import Any\n"
            f"from thalweg import Moment, Rule, Update, average, sign\n\n\n{source}"
        )
        monkeypatch.chdir(tmp_path)

    def test_every_verb_takes_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("click")
        from thalweg.cli import run

        for line in (
            "plan gpt2 --optimizers spelt_rules:Spelt,lamb --option spelt_rules:Spelt.beta=0.5 --json",
            "race --optimizers spelt_rules:Spelt --steps 2 --seeds 1 --option lr=0.1 --json",
        ):
            ended = run(line.split())
            shown = capsys.readouterr()
            assert ended == 0, shown.err
            assert "Spelt" in shown.out or "spelt" in shown.out, line

    @pytest.mark.parametrize(
        ("reference", "message"),
        [
            ("spelt_rules:Spelled", "module 'spelt_rules' has no 'Spelled': did you mean 'Spelt'?"),
            ("spelt_rules:average", "it must be a rule, or a function that takes a model"),
            ("no_such_module:Rule", "there is no module 'no_such_module'"),
            ("spelt rules:Rule", "is not a module name: write it as for an import, such as mymodule:MyRule"),
        ],
    )
    def test_what_is_no_rule_is_said_so(self, reference: str, message: str) -> None:
        if "takes a model" in message:
            pytest.importorskip("torch")
        with pytest.raises(CommandError, match=message):
            plan(small_model(), optimizers=[reference])
