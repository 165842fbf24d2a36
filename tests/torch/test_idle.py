"""An optimizer that trains nothing says so; one that waits for gradients says nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import thalweg.torch
from thalweg import IdleWarning, ParameterError


def model() -> Any:
    return torch.nn.Linear(3, 2)


def backward(net: Any) -> None:
    net(torch.ones(3)).sum().backward()


def test_tensors_of_a_state_dict_are_not_those_of_the_model() -> None:
    net = model()
    optimizer = thalweg.torch.AdamW(net.state_dict().values(), lr=0.1)
    backward(net)
    with pytest.warns(IdleWarning, match=r"none of its 2 parameters requires gradients; pass model.parameters\(\)"):
        optimizer.step()
    optimizer.step()  # it is told once


@pytest.mark.parametrize("pattern", ["", "[bw]*", lambda name, p: True], ids=["one rule", "by name", "by function"])
def test_a_generator_that_is_used_up(pattern: Any) -> None:
    params = model().named_parameters() if pattern else model().parameters()
    groups = [{"params": params}, {"params": params, "lr": 0.2}]
    entries = [(pattern, thalweg.torch.AdamW.options())]
    with pytest.warns(IdleWarning, match="parameter group 1 has no parameters: its 'params' is an iterator"):
        optimizer = thalweg.torch.Mixture(groups, entries) if pattern else thalweg.torch.AdamW(groups, lr=0.1)
    assert optimizer.num_parameters == 2
    if pattern:
        with pytest.warns(IdleWarning), pytest.raises(ParameterError, match="params has groups without any parameter"):
            thalweg.torch.Mixture(groups, entries)
    optimizer.add_param_group({"params": []})
    with pytest.warns(IdleWarning, match="parameter group [13] has no parameters"):
        optimizer.add_param_group({"params": iter([])})


def test_parameters_that_were_materialized_elsewhere() -> None:
    with torch.device("meta"):
        net = model()
    optimizer = thalweg.torch.AdamW(net.parameters(), lr=0.1)
    net.weight, net.bias = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 3), (2,)))
    backward(net)
    with pytest.warns(IdleWarning, match="its 2 parameters are on the meta device"):
        optimizer.step()


def test_parameters_of_another_model() -> None:
    net = model()
    optimizer = thalweg.torch.AdamW(net.parameters(), lr=0.1)
    backward(copy.deepcopy(net))
    optimizer.step()
    with pytest.warns(IdleWarning, match="none of its 2 parameters has had a gradient in 2 steps; call back"):
        optimizer.step()
    optimizer.step()


def frozen_in_part(optimizer: Any, net: Any) -> None:
    net.bias.requires_grad_(False)
    backward(net)
    optimizer.step()


def before_backward(optimizer: Any, net: Any) -> None:
    """And later steps that come late, as of two optimizers that take turns."""
    optimizer.step()
    backward(net)
    for _ in range(4):
        optimizer.step()
        optimizer.zero_grad()


def with_a_closure(optimizer: Any, net: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(lambda: backward(net))


def gradients_without_autograd(optimizer: Any, net: Any) -> None:
    for p in net.parameters():
        p.requires_grad_(False).grad = torch.ones_like(p)
    optimizer.step()


def one_by_one(optimizer: Any, net: Any) -> None:
    """As in the middle of a backward pass; trainers call step() all the same."""
    backward(net)
    for p in net.parameters():
        optimizer.step_parameter(p)
        p.grad = None
    for _ in range(3):
        optimizer.step()


@pytest.mark.parametrize(
    "use", [frozen_in_part, before_backward, with_a_closure, gradients_without_autograd, one_by_one]
)
def test_what_trains_or_will_is_not_warned_of(use: Any) -> None:
    net = model()
    optimizer = thalweg.torch.AdamW([{"params": net.parameters()}, {"params": []}], lr=0.1)
    use(optimizer, net)  # warnings are errors here
