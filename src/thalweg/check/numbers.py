"""What the numbers of a step may depend on, and what not."""

from __future__ import annotations

import random

import pytest
import torch

from thalweg.check import expect
from thalweg.check.problem import GRADIENT, TorchSubject, require_option, train, unless_refused, values, weights


def test_deterministic(s: TorchSubject) -> None:
    """The same run gives the same bits: else no result can be reproduced."""
    expect.usual(s, s.run_steps(steps=5), 5, "the same run again")


def test_independent_of_the_global_seed(s: TorchSubject) -> None:
    """Steps do not depend on torch's global generator: replicas with different seeds would drift apart."""
    params, optimizer = s.make_fresh()
    torch.manual_seed(1)
    expect.usual(s, train(optimizer, params, 5), 5, "with another global seed")


def test_generators_untouched(s: TorchSubject) -> None:
    """A step draws nothing from global generators: dropout and data order would depend on the optimizer."""
    params, optimizer = s.make_fresh()
    before = torch.get_rng_state(), random.getstate()
    train(optimizer, params, 3)
    if not torch.equal(torch.get_rng_state(), before[0]):
        pytest.fail("torch's generator has moved")
    if random.getstate() != before[1]:
        pytest.fail("Python's generator has moved")


def test_independent_of_other_parameters(s: TorchSubject) -> None:
    """A parameter's steps do not depend on which others the optimizer has, of the same shape too."""
    s.require_not("couples_parameters")
    shapes = [(6, 4), (6, 4), (5, 6)]
    together, start = s.run_steps(shapes, 4), weights(shapes)
    for place, shape in enumerate(shapes):
        alone = weights([shape], which=[place])
        train(s.make(alone), alone, 4, which=[place])
        expect.close(alone, together[place : place + 1], start[place : place + 1], f"parameter {place} by itself", 1e-5)


def test_order_of_parameters(s: TorchSubject) -> None:
    """The order of parameters does not matter: refactoring a model must not change its training."""
    s.require_not("couples_parameters")
    params = s.weights()
    backwards, which = params[::-1], range(len(params))[::-1]
    train(s.make(backwards), backwards, 4, which=which)
    expect.usual(s, params, 4, "in the opposite order", 1e-5)


def test_one_group_or_many(s: TorchSubject) -> None:
    """A group for each parameter gives the same steps as one group for all."""
    s.require_not("couples_parameters")
    params = s.weights()
    reached = train(s.make([{"params": [p]} for p in params]), params, 4)
    expect.usual(s, reached, 4, "with a group each", 1e-5)


def test_lr_zero(s: TorchSubject) -> None:
    """A learning rate of 0 moves nothing: warm-ups begin there, and loading sharded state relies on it."""
    if not s.facts.lr_zero_is_no_step:
        pytest.skip("declared otherwise")
    params, optimizer = s.make_fresh()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    expect.same(train(optimizer, params, 2), s.weights(), "after two steps with lr 0")


def test_zero_gradients(s: TorchSubject) -> None:
    """Gradients of zero from the first step on give finite steps: unused experts and dead units have them."""
    params, optimizer = s.make_fresh()
    train(optimizer, params, 3, size=0.0)
    expect.finite(params, "after three gradients of zero")


def test_zero_parameters(s: TorchSubject) -> None:
    """Parameters that begin at zero, as biases and output layers do, get away from there."""
    params = s.weights()
    with torch.no_grad():
        for p in params:
            p.zero_()
    expect.finite(train(s.make(params), params, 5), "after five steps from zero")
    for place, p in enumerate(params):
        if not p.any():
            pytest.fail(f"parameter {place} {tuple(p.shape)} is still zero after five steps")


def test_huge_gradients(s: TorchSubject) -> None:
    """Gradients of 1e15, whose squares float32 still holds, give finite parameters."""
    params, optimizer = s.make_fresh(lr=1e-3)
    train(optimizer, params, 3, size=1e15)
    expect.finite(params, "after gradients of 1e15")


def test_tiny_gradients(s: TorchSubject) -> None:
    """Gradients of 1e-25, whose squares vanish in float32, give finite parameters."""
    params, optimizer = s.make_fresh()
    train(optimizer, params, 3, size=1e-25)
    expect.finite(params, "after gradients of 1e-25")


def test_descends(s: TorchSubject) -> None:
    """A simple bowl is descended: the sum of squares is smaller after fifty steps."""
    params, optimizer = s.make_fresh()
    before = sum(float(p.detach().square().sum()) for p in params)
    for _ in range(50):
        for p in params:
            p.grad = p.detach() / 2
        optimizer.step()
    after = sum(float(p.detach().square().sum()) for p in params)
    if not after < before:
        pytest.fail(f"the loss went from {before:.3g} to {after:.3g}")


def test_maximize(s: TorchSubject) -> None:
    """maximize=True ascends: it steps as minimizing does with opposite gradients."""
    params = s.weights()
    require_option(s.make(params), "maximize")
    optimizer = s.make(params, maximize=True)
    train(optimizer, params, 3, size=-GRADIENT)
    expect.usual(s, params, 3, "maximize=True with opposite gradients")


def test_float64_agrees(s: TorchSubject) -> None:
    """float64 and float32 go the same way: else one of them computes something else."""
    params, optimizer = s.make_fresh(torch.float64)
    start, reached = values(params), s.run_steps(steps=3)
    expect.close(reached, train(optimizer, params, 3), start, "float32 and float64", 2e-2)


def test_lr_as_a_tensor(s: TorchSubject) -> None:
    """Where lr may be a tensor of one element, in float32 or float64, it steps as the number does."""
    rate = float(s.make(s.weights()).param_groups[0]["lr"] or 1e-2)
    plain = s.run_steps(steps=3, lr=rate)
    for shape, dtype in (((), torch.float32), ((1,), torch.float64)):
        params = s.weights()
        with unless_refused("lr as a tensor"):
            reached = train(s.make(params, lr=torch.full(shape, rate, dtype=dtype)), params, 3)
        expect.close(reached, plain, s.weights(), f"with a tensor of shape {shape} as lr", 1e-4)


def test_weight_decay_shrinks(s: TorchSubject) -> None:
    """weight_decay pulls parameters towards zero: they end nearer to it than without."""
    params = s.weights()
    require_option(s.make(params), "weight_decay")
    sizes = [[float(p.norm()) for p in s.run_steps(steps=10, lr=1e-2, weight_decay=decay)] for decay in (0.0, 0.5)]
    if not sum(sizes[1]) < sum(sizes[0]):
        pytest.fail(f"norms with decay 0.5 sum to {sum(sizes[1]):.4g}, without to {sum(sizes[0]):.4g}")


def test_weight_decay_by_group(s: TorchSubject) -> None:
    """A group's own weight_decay holds for it alone: biases and norms go without."""
    s.require_not("couples_parameters")
    params = s.weights()
    require_option(s.make(params), "weight_decay")
    groups = [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:]}]
    reached = train(s.make(groups, weight_decay=0.0), params, 3)
    plain = s.run_steps(steps=3, weight_decay=0.0)
    expect.same(reached[1:], plain[1:], "decay of another group")
    expect.changed(reached[:1], plain[:1], "a group's own weight_decay")


def test_late_parameters(s: TorchSubject) -> None:
    """A parameter whose first gradient comes late begins then: its averages start at their own first step."""
    s.require_not("couples_parameters")
    params, optimizer = s.make_fresh()
    train(optimizer, params, 6, without=[0])
    train(optimizer, params, 2, first=6)
    alone, start = s.weights()[:1], s.weights()[:1]
    wanted = train(s.make(alone), alone, 2, first=6)
    expect.close(params[:1], wanted, start, "two steps after six without gradient", 1e-4)
