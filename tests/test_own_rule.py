"""A rule that somebody has added: every verb of the command line takes it, in every front end."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from thalweg.arrays import A, Scalar, Shape, Space, Squares, State
from thalweg.bench import bench
from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor
from thalweg.race import ArrayTask, ModelTask, race
from thalweg.rules import RULES
from thalweg.rules.blocks import average
from thalweg.rules.entries import Entry, Moment
from thalweg.rules.rule import Noise, Rule, Update
from thalweg.show.palette import COLOURS, RIVALS, colour_of

MODEL = Model("small", "", (Tensor("w", (60, 40)), Tensor("b", (40,))))
ELEMENTS = MODEL.parameters


@dataclass(frozen=True, kw_only=True)
class Lion(Rule):
    """As in CONTRIBUTING."""

    betas: tuple[Scalar, Scalar] = (0.9, 0.99)
    weight_decay: Scalar = 0.0

    def validate(self) -> None:
        super().validate()

    def entries(self, shape: Shape) -> dict[str, Entry]:
        return {"exp_avg": Moment()}

    def update(
        self,
        xp: Space[A],
        g: A,
        s: State[A],
        p: A,
        *,
        t: Scalar,
        lr: Scalar | None,
        lr_scale: Scalar = 1.0,
        noise: Noise[A] | None = None,
    ) -> Update:
        assert lr is not None
        b1, b2 = self.betas
        mixed = average(s["exp_avg"], g, 1 - b1)
        sign = xp.where(mixed > 0, 1.0, xp.where(mixed < 0, -1.0, 0.0))
        (g_squares,) = xp.sums(Squares(g, self.own_axes(xp.shape(p))))
        delta = (sign + self.weight_decay * p) * (-lr * lr_scale)
        return Update(delta, {"exp_avg": average(s["exp_avg"], g, 1 - b2)}, xp.isfinite(g_squares), {})


@dataclass(frozen=True, kw_only=True)
class Turned(Lion):
    """One of which no fused code can be made, because it turns matrices."""

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        return super().update(xp, xp.swapaxes(xp.swapaxes(g, 0, -1), 0, -1), s, p, **rest)


@pytest.fixture(autouse=True, params=[Lion, Turned])
def rule(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(RULES, request.param.__name__, request.param)  # type: ignore[arg-type]
    return str(request.param.__name__)


@pytest.mark.parametrize(
    "where", [{"device": "cpu"}, {"front_end": "numpy"}, {"front_end": "optax"}, {"device": "cuda"}]
)
def test_plan(rule: str, where: dict[str, str]) -> None:
    (cost,) = plan(MODEL, optimizers=[rule.lower()], **where).costs
    counts = {"numpy": 8 * 2, "optax": 4}.get(where.get("front_end", ""), 4 * 2)
    assert cost.share.state_bytes == 4 * ELEMENTS + counts
    assert cost.share.moved_bytes >= 20 * ELEMENTS  # reads p, g and m, and writes p and m
    assert rule in [each.optimizer for each in plan(MODEL, **where).costs]


def test_plans_of_shards(rule: str) -> None:
    (cost,) = plan(MODEL, optimizers=[rule], device="cpu", world=2, layout="fsdp2").costs
    assert cost.share.state_bytes == 4 * (30 * 40 + 20) + 4 * 2


@pytest.mark.in_turn
@pytest.mark.parametrize("front_end", ["torch", "numpy"])
def test_its_peak_is_measured(rule: str, front_end: str) -> None:
    from measured_peaks import allocator_peak, traced_peak

    shapes = [(600, 700), (300, 500), (90,)]
    model = Model("larger", "", tuple(Tensor(f"p{i}", shape) for i, shape in enumerate(shapes)))
    engine = "foreach" if front_end == "torch" else "reference"
    planned = plan(model, optimizers=[rule], front_end=front_end, device="cpu", engine=engine).costs[0].share.peak_bytes
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype("float32") for shape in shapes]
    if front_end == "torch":
        torch = pytest.importorskip("torch")
        from thalweg.show.registered import torch_optimizer

        params = [torch.nn.Parameter(torch.from_numpy(array)) for array in arrays]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = torch_optimizer(rule)(params, lr=1e-3, engine="foreach")
        measured = allocator_peak(optimizer.step, warm_up=1)
    else:
        from thalweg.show.registered import numpy_optimizer

        grads = [np.ones_like(array) for array in arrays]
        stepper = numpy_optimizer(rule)(lr=1e-3, engine="reference")
        measured = traced_peak(lambda: stepper.step(arrays, grads), warm_up=1)
    assert measured > 2**20
    assert planned == pytest.approx(measured, rel=0.05, abs=2**20)


def parabola() -> ArrayTask:
    return ArrayTask(
        name="parabola",
        init=lambda seed: {"x": np.random.default_rng(seed).normal(size=(3, 4))},
        gradients=lambda params, batch: {"x": 2 * params["x"]},
        evaluate=lambda params: np.square(params["x"]).sum(),
        steps=5,
    )


def test_a_race_in_numpy(rule: str) -> None:
    summary = race(parabola(), optimizers=[rule, "LAMB"], seeds=1).run().summary
    looks = {who["name"]: who for who in summary["contestants"]}
    assert looks[rule]["colour"] == colour_of(rule)
    assert looks[rule]["colour"] not in (*COLOURS.values(), *RIVALS)
    (course,) = summary["courses"]
    losses = [result["loss"] for result in course["results"] if result["contestant"] == rule]
    assert losses
    assert json.dumps(summary)


def test_a_race_in_torch(rule: str) -> None:
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
    summary = race(task, optimizers=[rule], seeds=1, rates={"": [0.01]}).run().summary
    assert summary["missing"] == 0


@pytest.mark.parametrize("front_end", ["torch", "numpy", "optax"])
def test_bench(rule: str, front_end: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = {"torch": ["torch"], "numpy": [], "optax": ["jax", "optax"]}[front_end]
    for package in needed:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    found = bench(MODEL, rules=[rule.lower()], against=[], front_ends=[front_end], repeats=1, memory=False, wait=0.0)
    (comparison,) = found.comparisons
    assert [row.entrant.front_end for row in comparison.rows] == [front_end]


def test_explain(rule: str) -> None:
    rows = plan(MODEL, optimizers=[rule], front_end="numpy").explain(rule).rows
    assert [row.state_bytes for row in rows] == [4 * 2400 + 8, 4 * 40 + 8]
    assert "exp_avg" not in str(rows[0].warnings)
