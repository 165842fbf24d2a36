"""What the library was asked for first: five interfaces, called as a user of Python calls them.

Adafactor with ``step(name, shape, param, grad)``; LAMB over a model's parameters; LARS that checks what it is given, by
tensor and by one node of a graph; Kron beside flat buffers; and optax's Adafactor with its printed example.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from typing import Any

import numpy as np
import pytest
from tolerances import FLOAT64

import thalweg
from thalweg.numpy import LAMB, LARS, Adafactor, Kron
from thalweg.protocols import LearningRate, StepOptimizer

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
needs_optax = pytest.mark.skipif(importlib.util.find_spec("optax") is None, reason="needs optax")
EVERY = (Adafactor, LAMB, LARS, Kron)


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape)


def close(one: Any, other: Any) -> bool:
    return bool(np.allclose(one, other, rtol=FLOAT64, atol=FLOAT64))


# ---- what all of them have: step(name, shape, param, grad), end_iteration(), lr_scale(name)


@pytest.mark.parametrize("make", EVERY)
def test_a_flat_buffer_is_stepped_by_name_and_shape_as_the_tensor_is(make: type) -> None:
    shaped, grad = drawn(6, 4), drawn(6, 4, seed=1)
    flat, first, second = shaped.reshape(-1).copy(), make(0.1), make(0.1)
    for _ in range(3):
        assert first.update("w", flat, grad.reshape(-1), shape=(6, 4)) is None
        second.update("w", shaped, grad)
    assert flat.tobytes() == shaped.tobytes()


@pytest.mark.parametrize("make", EVERY)
def test_the_end_of_an_iteration_advances_the_count_of_all(make: type) -> None:
    rates: list[int] = []

    def lr(t: int) -> float:
        rates.append(t)
        return 0.1

    optimizer = make(lr, global_step=True)
    rates.clear()  # a function is called once to be checked
    for _ in range(2):
        for name in ("a", "b"):
            optimizer.update(name, np.ones(3), np.ones(3))
        optimizer.end_iteration()
    assert rates == [1, 1, 2, 2]
    assert make(0.1).end_iteration() is None


@pytest.mark.parametrize("make", EVERY)
def test_lr_scale_is_one_for_every_name_and_made_to_be_overridden(make: type) -> None:
    class Scaled(make):  # type: ignore[misc]
        def lr_scale(self, name: str | int) -> float:
            return 0.25 if name == "embedding" else super().lr_scale(name)

    assert make(0.1).lr_scale("embedding") == 1.0
    scaled, called = Scaled(0.1), make(0.1)
    by_method, by_call, plain = drawn(4, 3), drawn(4, 3), drawn(4, 3)
    grad = drawn(4, 3, seed=1)
    scaled.update("embedding", by_method, grad)
    called.update("embedding", by_call, grad, lr_scale=0.25)
    make(0.1).update("embedding", plain, grad)
    assert by_method.tobytes() == by_call.tobytes() != plain.tobytes()


@pytest.mark.parametrize("make", EVERY)
def test_it_is_cloned_shown_and_recognised(make: type) -> None:
    optimizer, weights = make(0.1), drawn(4, 3)
    optimizer.update("w", weights, drawn(4, 3, seed=1))
    twin, other = copy.copy(optimizer), weights.copy()
    for each, tensor in ((optimizer, weights), (twin, other)):
        each.update("w", tensor, drawn(4, 3, seed=2))
    assert weights.tobytes() == other.tobytes()
    assert eval(repr(optimizer), {make.__name__: make}).options == optimizer.options
    assert isinstance(optimizer, LearningRate)
    assert isinstance(optimizer, StepOptimizer)


# ---- Adafactor


def test_adafactor_has_the_defaults_of_its_paper() -> None:
    optimizer = Adafactor()
    options = optimizer.options
    assert optimizer.lr is None
    assert options["beta2_decay"] == -0.8
    assert options["eps"] == (1e-30, 1e-3)  # eps1 and eps2
    assert options["clip_threshold"] == 1.0
    assert options["weight_decay"] == 0.0
    assert repr(optimizer) == "Adafactor()"


def test_adafactor_without_a_rate_takes_the_relative_step_and_with_one_the_manual() -> None:
    weights, grad = drawn(3, seed=3), drawn(3, seed=4)
    relative, manual = weights.copy(), weights.copy()
    Adafactor().update("w", relative, grad)
    Adafactor().with_lr(0.5).update("w", manual, grad)
    update = grad / np.sqrt(grad**2 + 1e-30)
    update /= max(1.0, math.sqrt((update**2).mean()))
    rms = max(1e-3, math.sqrt((weights**2).mean()))
    assert close(relative, weights - min(1.0, 1e-2) * rms * update)
    assert close(manual, weights - 0.5 * rms * update)


def test_adafactor_keeps_rows_and_columns_of_matrices_and_all_squares_of_vectors() -> None:
    optimizer = Adafactor(min_dim_size_to_factor=1)
    optimizer.update("matrix", np.ones((5, 7)), np.ones((5, 7)))
    optimizer.update("vector", np.ones(9), np.ones(9))
    assert {key: np.size(value) for key, value in optimizer.state["matrix"].items()} == {
        "step": 1,
        "row_var": 5,
        "col_var": 7,
    }
    assert optimizer.state["vector"]["variance"].shape == (9,)


def test_adafactor_builders_check_and_leave_the_first_alone() -> None:
    first = Adafactor()
    second = first.with_lr(0.1).with_weight_decay(0.01)
    assert (first.lr, second.lr, second.options["weight_decay"]) == (None, 0.1, 0.01)
    with pytest.raises(thalweg.OptionError, match="weight_decay must be"):
        first.with_weight_decay(-1.0)


# ---- LAMB


def lamb_step(p: Any, g: Any, m: Any, v: Any, t: int, *, lr: float, decay: float, correct: bool = True) -> Any:
    """The update of the paper: moments, corrected, and the ratio of the norms of the parameter and the update."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
    m_hat, v_hat = (m / (1 - 0.9**t), v / (1 - 0.999**t)) if correct else (m, v)
    r = m_hat / (np.sqrt(v_hat) + 1e-6) + decay * p
    return p - lr * np.linalg.norm(p) / np.linalg.norm(r) * r, m, v


@pytest.mark.parametrize("correct", [True, False])
def test_lamb_is_its_formula(correct: bool) -> None:
    optimizer = LAMB(0.02, variant="paper").with_weight_decay(0.1).with_bias_correction(correct)
    weights = drawn(5, 3)
    p, m, v = weights.copy(), 0.0, 0.0
    for t in range(1, 4):
        grad = drawn(5, 3, seed=t)
        optimizer.update("w", weights, grad)
        p, m, v = lamb_step(p, grad, m, v, t, lr=0.02, decay=0.1, correct=correct)
    assert close(weights, p)


def test_lamb_has_the_defaults_and_builders_that_were_asked_for() -> None:
    optimizer = LAMB(0.01)
    options = optimizer.options
    assert (options["betas"], options["eps"], options["weight_decay"]) == ((0.9, 0.999), 1e-6, 0.0)
    chained = optimizer.with_betas(0.8, 0.99).with_eps(1e-7).with_weight_decay(0.1).with_bias_correction(False)
    at_once = LAMB(0.01).with_options(betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1, bias_correction=False)
    assert chained.options == at_once.options != options
    with pytest.raises(thalweg.OptionError, match=r"betas\[1\] must be .* < 1"):
        optimizer.with_betas(0.9, 1.0)
    with pytest.raises(thalweg.OptionError, match=r"eps must be .* >= 0"):
        optimizer.with_eps(-1.0)


@needs_torch
def test_lamb_steps_the_parameters_of_a_model() -> None:
    import torch

    from thalweg.torch import LAMB

    weight, bias = (torch.nn.Parameter(torch.from_numpy(drawn(*shape))) for shape in ((5, 3), (3,)))
    before, grad = weight.detach().numpy().copy(), drawn(5, 3, seed=1)
    optimizer = LAMB([weight, bias], lr=0.02, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, variant="paper")
    weight.grad = torch.from_numpy(grad)
    assert optimizer.step() is None
    assert close(weight.detach().numpy(), lamb_step(before, grad, 0.0, 0.0, 1, lr=0.02, decay=0.1)[0])
    optimizer.zero_grad()
    assert weight.grad is None
    assert optimizer.param_groups[0]["params"] == [weight, bias]
    optimizer.lr = 0.5
    assert optimizer.param_groups[0]["lr"] == optimizer.lr == 0.5


def test_lamb_counts_its_parameters() -> None:
    optimizer = LAMB(0.1)
    optimizer.step([np.ones((2, 2)), np.ones(3)], [np.ones((2, 2)), np.ones(3)])
    assert optimizer.num_parameters == 2


# ---- LARS


def test_lars_is_its_formula() -> None:
    optimizer = LARS(0.5).with_momentum(0.8).with_weight_decay(0.01).with_trust_coefficient(0.02)
    weights = drawn(5, 3)
    p, momentum = weights.copy(), 0.0
    for t in range(1, 4):
        grad = drawn(5, 3, seed=t)
        optimizer.update(7, weights, grad)  # a whole number names a parameter as well
        norm, grad_norm = np.linalg.norm(p), np.linalg.norm(grad)
        local = 0.5 * 0.02 * norm / (grad_norm + 0.01 * norm)
        momentum = 0.8 * momentum + local * (grad + 0.01 * p)
        p = p - momentum
    assert close(weights, p)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.with_momentum(1.0), "momentum must be"),
        (lambda o: o.with_momentum(-0.1), "momentum must be"),
        (lambda o: o.with_weight_decay(-0.1), "weight_decay must be"),
        (lambda o: o.with_weight_decay(math.inf), "weight_decay must be"),
        (lambda o: o.with_trust_coefficient(-1.0), "trust_coefficient must be"),
        (lambda o: o.with_lr(-1.0), "lr must be"),
        (lambda o: setattr(o, "lr", math.nan), "lr must be"),
        (lambda o: LARS(-0.1), "lr must be"),
    ],
)
def test_lars_refuses_what_is_out_of_range_and_stays_as_it_was(change: Any, words: str) -> None:
    optimizer = LARS(0.5)
    before = repr(optimizer)
    with pytest.raises(thalweg.OptimError, match=words):
        change(optimizer)
    assert repr(optimizer) == before


def test_lars_reads_and_sets_its_rate_and_drops_its_state() -> None:
    optimizer, first, again = LARS(0.5), drawn(4), drawn(4)
    optimizer.lr = 0.25
    assert optimizer.lr == 0.25
    optimizer.update("w", first, np.ones(4))
    optimizer.clear_state()
    assert (optimizer.num_parameters, dict(optimizer.state)) == (0, {})
    optimizer.update("w", again, np.ones(4))
    assert first.tobytes() == again.tobytes()


def test_lars_says_what_it_cannot_step() -> None:
    weights = np.ones(4)
    with pytest.raises(thalweg.ParameterError, match=r"gradient of 'w' has shape \(3,\)"):
        LARS(0.5).update("w", weights, np.ones(3))
    assert weights.tolist() == [1.0] * 4


@needs_torch
def test_lars_steps_one_node_of_a_graph() -> None:
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


# ---- Kron


def test_kron_has_the_defaults_that_were_asked_for() -> None:
    options = Kron(0.1, variant="polyak").options
    names = ("precond_lr", "momentum", "weight_decay", "eps", "clip")
    assert {name: options[name] for name in names} == {
        "precond_lr": 0.1,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "eps": 1e-8,
        "clip": 1.0,
    }


def test_kron_caps_each_coordinate_of_its_update_and_folds_the_decay_into_the_gradient() -> None:
    optimizer = Kron(0.1, variant="polyak", momentum=0.0)
    weights = drawn(6, 4)
    for t in range(5):
        before = weights.copy()
        optimizer.update("w", weights, 1e3 * drawn(6, 4, seed=t))
        assert np.abs(before - weights).max() <= 0.1 * (1 + FLOAT64)
    decayed, added = drawn(6, 4), drawn(6, 4)
    grad = drawn(6, 4, seed=9)
    Kron(0.1, variant="polyak", weight_decay=0.3).update("w", decayed, grad)
    Kron(0.1, variant="polyak").update("w", added, grad + 0.3 * added)
    assert close(decayed, added)


# ---- optax


@needs_optax
def test_adafactor_of_optax_has_its_arguments_and_its_defaults() -> None:
    import inspect

    import optax

    import thalweg.optax

    theirs = inspect.signature(optax.adafactor).parameters
    ours = inspect.signature(thalweg.optax.adafactor).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    assert {name: p.default for name, p in theirs.items()} == {name: ours[name].default for name in theirs}


@needs_optax
def test_the_printed_example_of_optax_prints_what_it_says() -> None:
    import jax
    import jax.numpy as jnp
    import optax

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
