"""What the library was asked for first, as users of Python call it, where no other test has it.

Buffers by name and shape, counts and scales: tests/numpy/test_name_by_name.py. Copies, builders and what is out of
range: test_every_option.py there. Formulas: tests/published and tests/rules.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT64

import thalweg
from thalweg.numpy import LAMB, LARS, Adafactor, Kron
from thalweg.protocols import LearningRate, StepOptimizer


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    "optimizer", [Adafactor(), LAMB(0.1), LARS(0.1), Kron(0.1)], ids=lambda each: each.rule.__name__
)
def test_every_optimizer_has_the_interface(optimizer: Any) -> None:
    assert isinstance(optimizer, LearningRate)
    assert isinstance(optimizer, StepOptimizer)
    assert optimizer.update("w", drawn(4, 3), drawn(4, 3, seed=1)) is None
    assert optimizer.end_iteration() is None
    assert optimizer.lr_scale("w") == 1.0
    assert optimizer.num_parameters == 1


@pytest.mark.parametrize(
    ("optimizer", "lr", "defaults"),
    [
        (Adafactor(), None, dict(beta2_decay=-0.8, eps=(1e-30, 1e-3), clip_threshold=1.0, weight_decay=0.0)),
        (LAMB(0.01), 0.01, dict(betas=(0.9, 0.999), eps=1e-6, weight_decay=0.0)),
        (
            Kron(0.1, variant="polyak"),
            0.1,
            dict(precond_lr=0.1, momentum=0.9, weight_decay=0.0, eps=1e-8, clip=1.0),
        ),
    ],
    ids=["Adafactor", "LAMB", "Kron"],
)
def test_defaults_are_those_that_were_asked_for(optimizer: Any, lr: Any, defaults: dict[str, Any]) -> None:
    assert optimizer.lr == lr
    assert {name: optimizer.options[name] for name in defaults} == defaults


def test_lars_steps_one_node_of_a_graph() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    import torch

    from thalweg.torch import LARS

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    optimizer = LARS(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step_parameter(model[0].weight) is None
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [True, False, False, False]
    with pytest.raises(thalweg.ParameterError):
        optimizer.step_parameter(torch.nn.Parameter(torch.ones(2)))


def test_kron_caps_each_coordinate_of_its_update_and_folds_the_decay_into_the_gradient() -> None:
    optimizer = Kron(0.1, variant="polyak", momentum=0.0)
    weights = drawn(6, 4)
    for t in range(5):
        before = weights.copy()
        optimizer.update("w", weights, 1e3 * drawn(6, 4, seed=t))
        assert np.abs(before - weights).max() <= 0.1 * (1 + FLOAT64)
    decayed, added, grad = drawn(6, 4), drawn(6, 4), drawn(6, 4, seed=9)
    Kron(0.1, variant="polyak", weight_decay=0.3).update("w", decayed, grad)
    Kron(0.1, variant="polyak").update("w", added, grad + 0.3 * added)
    assert np.allclose(decayed, added, rtol=FLOAT64, atol=FLOAT64)


def test_the_printed_example_of_optax_prints_what_it_says() -> None:
    optax = pytest.importorskip("optax")
    import jax
    import jax.numpy as jnp

    import thalweg.optax

    def f(x: Any) -> Any:
        return jnp.sum(x**2)

    solver = thalweg.optax.adafactor(learning_rate=0.003)
    params = jnp.array([1.0, 2.0, 3.0], jnp.float32)
    printed = [f"Objective function:  {f(params)}"]
    opt_state = solver.init(params)
    for _ in range(5):
        updates, opt_state = solver.update(jax.grad(f)(params), opt_state, params)
        params = optax.apply_updates(params, updates)
        printed.append(f"Objective function: {f(params):.2E}")
    assert printed == ["Objective function:  14.0", *(f"Objective function: 1.3{i}E+01" for i in (9, 8, 8, 7, 6))]
