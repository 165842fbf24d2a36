"""A program is written as Python that people can read, and that computes what every engine does."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import EVERY
from lanes import by_turns
from own_rules import Layerwise, Signed
from programs import run_source

from thalweg.numpy import SGD, Mixture, optimizer
from thalweg.programs.text import write_setting
from thalweg.rules import RULES, Rule, Update
from thalweg.settings import Settings

GOLDEN = Path(__file__).with_name("golden")
#: The first options of each rule: that programs compute what every option says, test_trace.py holds.
OPTIONS: list[tuple[type[Rule], dict[str, Any]]] = [
    *((case.rule, options) for case in EVERY if not case.rule.needs_whole for options in [*case.options.values()][:2]),
    *((rule, {"weight_decay": 0.1}) for rule in (Signed, Layerwise)),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("LARS", {"weight_decay": 0.1}),
        ("LAMB", {"weight_decay": 0.1}),
        ("Adafactor", {"min_dim_size_to_factor": 2}),
    ],
)
def test_passes_are_written_down(name: str, options: dict[str, Any]) -> None:
    """What each pass reads, computes and writes: a change of a rule or of the scheduler shows here."""
    found = write_setting(Settings(RULES[name], options).base, (64, 32), "float32")
    assert found == (GOLDEN / f"{name}.txt").read_text()


@by_turns()
@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 3, 2, 2)], ids=str)
@pytest.mark.parametrize(("rule", "options"), OPTIONS, ids=lambda case: getattr(case, "__name__", None) or str(case))
def test_it_computes_what_the_reference_computes(rule: type[Rule], options: dict[str, Any], shape: Any) -> None:
    """Three steps in float64, state included, with the source that explain() shows."""
    random = np.random.default_rng(0)
    lr = None if options.get("lr", 0.1) is None else 0.1
    steps = optimizer(rule)(engine="reference", **{**options, "lr": lr})
    params = {"w": random.standard_normal(shape)}
    explained = steps.explain(params, program=True)
    (source,) = explained.programs.values()
    assert source in str(explained)
    p, state = params["w"].copy(), {key: x.copy() for key, x in first_state(steps, params).items()}
    for t in range(1, 4):
        g = random.standard_normal(p.shape)
        steps.step(params, {"w": g})
        found = run_source(source, p, g, state, t=t, **({} if lr is None else {"lr": lr}))
        p, state = found.p, found.state
        np.testing.assert_allclose(p, params["w"], rtol=1e-13, atol=1e-15)
        kept = {key: x for key, x in steps.state["w"].items() if key != "step"}
        assert list(kept) == list(state)
        for key, entry in kept.items():
            np.testing.assert_allclose(state[key], entry, rtol=1e-13, atol=1e-15, err_msg=key)
        for key, figure in steps.stats()["w"].items():
            np.testing.assert_allclose(np.squeeze(found.stats[key]), figure, rtol=1e-13, err_msg=key)


def first_state(steps: Any, params: dict[str, Any]) -> dict[str, Any]:
    """The state before the first step."""
    first = steps.with_options(lr=steps.lr)
    first.step({"w": params["w"].copy()}, {"w": np.zeros_like(params["w"])})
    return {key: np.zeros_like(x) for key, x in first.state["w"].items() if key != "step"}


@pytest.mark.parametrize("rule", [RULES["Muon"], RULES["Kron"]])
def test_rules_that_multiply_matrices_are_named(rule: type[Rule]) -> None:
    found = write_setting(Settings(rule, {}).base, (6, 5), "float64")
    assert (
        found == f"# {rule.__name__} multiplies whole matrices: its arithmetic is {rule.__module__}.{rule.__name__}\n"
    )


@dataclass(frozen=True, kw_only=True)
class Branching(Signed):
    """One that asks a value for its truth, which nothing but numpy itself knows."""

    def update(self, xp: Any, g: Any, s: Any, p: Any, **rest: Any) -> Update:
        return super().update(xp, -g if (g > 0) else g, s, p, **rest)


def test_what_cannot_be_written_down_says_why() -> None:
    found = write_setting(Settings(Branching, {}).base, (4, 3), "float32")
    assert found.startswith("# Branching has no text: Branching, line ")
    assert "branches on a value that is known only when it runs: use xp.where" in found


def test_each_treatment_of_a_mixture_has_its_own() -> None:
    steps = Mixture([("w", optimizer(RULES["LAMB"]).options(lr=0.1)), ("*", SGD.options(lr=0.1))])
    params = {"w": np.ones((4, 3)), "b": np.ones(3)}
    found = steps.explain(params, program=True)
    assert list(found.programs) == ["LAMB, trust ratio, float64:", "SGD, elementwise, float64:"]
    assert steps.explain(params).programs == {}
    assert Mixture([("x", SGD.options(lr=0.1)), ("*", SGD.options(lr=0.1))]).explain(params).unused_entries == ["x"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="there is no torch here")
def test_torch_shows_the_same() -> None:
    import torch

    from thalweg.torch import LAMB

    steps = LAMB([torch.nn.Parameter(torch.ones(4, 3))], lr=0.1, weight_decay=torch.tensor(0.1))
    (source,) = steps.explain(program=True).programs.values()
    assert "lr_scale=1.0, betas=(0.9, 0.999), eps=1e-06, weight_decay):" in source
    assert steps.explain().programs == {}
    p, g, state = np.ones((4, 3)), np.ones((4, 3)), {key: np.zeros((4, 3)) for key in ("exp_avg", "exp_avg_sq")}
    (own,) = steps.param_groups[0]["params"]
    own.grad = torch.ones(4, 3)
    steps.step()
    found = run_source(source, p, g, state, t=1, lr=0.1, weight_decay=0.1)
    np.testing.assert_allclose(own.detach().numpy(), found.p, rtol=1e-6)


@pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="there is no jax here")
@pytest.mark.nightly
def test_jax_shows_the_same() -> None:
    import jax
    import jax.numpy as jnp
    import optax

    from thalweg.optax import explain, lamb

    params = {"w": jnp.ones((4, 3), jnp.float64)}
    shown = explain(optax.chain(lamb(0.1, weight_decay=0.1)), params, program=True)
    (source,) = shown.programs.values()
    assert source in str(shown)
    solver = lamb(0.1, weight_decay=0.1)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, _ = solver.update(grads, solver.init(params), params)
    state = {key: np.zeros((4, 3)) for key in ("exp_avg", "exp_avg_sq")}
    found = run_source(source, np.ones((4, 3)), np.ones((4, 3)), state, t=1, lr=0.1)
    np.testing.assert_allclose(optax.apply_updates(params, updates)["w"], found.p, rtol=1e-12)
