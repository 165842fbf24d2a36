"""Gradients that are not finite."""

from __future__ import annotations

import torch

from thalweg.check.problem import (
    assert_close,
    assert_same,
    give,
    make_fresh,
    run_steps,
    step_unless_refused,
    train,
    values,
    weights,
)
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.subject import Subject

SHAPES = [(6, 4), (6, 4), (5, 6)]


def after_one(s: Subject, bad: float) -> list[torch.nn.Parameter] | None:
    """Parameters after a step in which one element of the first gradient is bad; None where it is refused."""
    params, optimizer = make_fresh(s, shapes=SHAPES)
    give(params, 0)
    assert params[0].grad is not None
    params[0].grad[2, 1] = bad
    if step_unless_refused(optimizer):
        return params
    assert_same(values(params), values(weights(SHAPES)), "after a gradient that was refused")
    return None


def stays_local(s: Subject, bad: float) -> None:
    params, usual, start = after_one(s, bad), run_steps(s, SHAPES), weights(SHAPES)
    if params is not None and not torch.equal(params[1], start[1]):  # neither refused nor skipped
        assert_close(params[1:], usual[1:], start[1:], f"others, beside a gradient with {bad}", 1e-5)


@holds("non-finite", without="couples_parameters")
def nan_stays_local(s: Subject) -> None:
    """NaN in one gradient does not reach other parameters, unless the whole step is refused or skipped."""
    stays_local(s, float("nan"))


@holds("non-finite", without="couples_parameters")
def infinity_stays_local(s: Subject) -> None:
    """Infinity in one gradient does not reach other parameters, unless the whole step is refused or skipped."""
    stays_local(s, float("inf"))


@holds("non-finite")
def nan_is_not_hidden(s: Subject) -> None:
    """An element whose gradient is NaN becomes NaN or stays: a made-up step would hide the fault."""
    params = after_one(s, float("nan"))
    element = None if params is None else params[0][2, 1]
    if element is not None and not element.isnan() and element != weights(SHAPES)[0][2, 1]:
        raise Failed(f"the element moved to {float(element):.4g}")


@holds("non-finite", without="couples_parameters")
def frozen_nan(s: Subject) -> None:
    """A parameter that is NaN itself does not reach others."""
    params = weights(SHAPES)
    with torch.no_grad():
        params[0].fill_(float("nan"))
    try:
        found = train(s.make(params), params, 2)
    except Exception as error:
        raise NotOffered(f"parameters with NaN: {type(error).__name__}") from error
    assert_close(found[1:], run_steps(s, SHAPES, 2)[1:], weights(SHAPES)[1:], "beside a parameter that is NaN", 1e-5)
