"""Gradients that are not finite."""

from __future__ import annotations

import pytest
import torch

from thalweg.check import expect
from thalweg.check.problem import (
    TorchSubject,
    give,
    lay_like,
    step_unless_refused,
    train,
    unless_refused,
    values,
    weights,
)

SHAPES = [(6, 4), (6, 4), (5, 6)]


def step_with(s: TorchSubject, bad: float) -> list[torch.Tensor] | None:
    """Parameters after a step in which one element of the first gradient is bad; None where it is refused."""
    params, optimizer = s.make_fresh(shapes=SHAPES)
    give(params, 0)
    assert params[0].grad is not None
    (gradient,) = values([params[0].grad])
    gradient[2, 1] = bad
    params[0].grad = lay_like(params[0], gradient)
    if step_unless_refused(optimizer):
        return values(params)
    expect.same(params, weights(SHAPES), "after a gradient that was refused")
    return None


def assert_stays_local(s: TorchSubject, bad: float) -> None:
    s.require_not("couples_parameters")
    params, usual, start = step_with(s, bad), s.run_steps(SHAPES), weights(SHAPES)
    if params is not None and not torch.equal(params[1], start[1]):  # neither refused nor skipped
        expect.close(params[1:], usual[1:], start[1:], f"others, beside a gradient with {bad}", 1e-5)


def test_nan_stays_local(s: TorchSubject) -> None:
    """NaN in one gradient does not reach other parameters, unless the whole step is refused or skipped."""
    assert_stays_local(s, float("nan"))


def test_infinity_stays_local(s: TorchSubject) -> None:
    """Infinity in one gradient does not reach other parameters, unless the whole step is refused or skipped."""
    assert_stays_local(s, float("inf"))


def test_nan_is_not_hidden(s: TorchSubject) -> None:
    """An element whose gradient is NaN becomes NaN or stays: a made-up step would hide the fault."""
    params = step_with(s, float("nan"))
    element = None if params is None else params[0][2, 1]
    if element is not None and not element.isnan() and element != weights(SHAPES)[0][2, 1]:
        pytest.fail(f"the element moved to {float(element):.4g}")


def test_frozen_nan(s: TorchSubject) -> None:
    """A parameter that is NaN itself does not reach others."""
    s.require_not("couples_parameters")
    params = weights(SHAPES)
    with torch.no_grad():
        params[0].fill_(float("nan"))
    with unless_refused("parameters with NaN"):
        reached = train(s.make(params), params, 2)
    expect.close(reached[1:], s.run_steps(SHAPES, 2)[1:], weights(SHAPES)[1:], "beside a parameter that is NaN", 1e-5)
