"""An optimizer that trains nothing says so; one that waits for gradients says nothing."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg import IdleWarning, ParameterError  # noqa: E402


def model() -> Any:
    return torch.nn.Linear(3, 2)


def test_tensors_of_a_state_dict_are_not_those_of_the_model() -> None:
    net = model()
    optimizer = thalweg.torch.AdamW(net.state_dict().values(), lr=0.1)
    net(torch.ones(3)).sum().backward()
    with pytest.warns(IdleWarning, match=r"none of its 2 parameters requires gradients; pass model.parameters\(\)"):
        optimizer.step()
    optimizer.step()  # it is told once


def test_a_generator_that_is_used_up() -> None:
    net = model()
    params = net.parameters()
    groups = [{"params": params}, {"params": params, "lr": 0.2}]
    with pytest.warns(IdleWarning, match="parameter group 1 has no parameters: its 'params' is an iterator"):
        thalweg.torch.AdamW(groups, lr=0.1)


@pytest.mark.parametrize("pattern", ["*", lambda name, p: True], ids=["by name", "by function"])
def test_a_generator_that_is_used_up_before_a_mixture_divides_it(pattern: Any) -> None:
    params, entries = model().named_parameters(), [(pattern, thalweg.torch.AdamW.options())]
    groups = [{"params": params}, {"params": params, "lr": 0.2}]
    with pytest.warns(IdleWarning, match="a parameter group of this mixture has no parameters: its 'params' is"):
        optimizer = thalweg.torch.Mixture(groups, entries)
    assert optimizer.num_parameters == 2
    with pytest.warns(IdleWarning), pytest.raises(ParameterError, match="params has groups without any parameter"):
        thalweg.torch.Mixture(groups, entries)
    ready_made = thalweg.torch.muon_adamw(torch.nn.Sequential(model(), torch.nn.Tanh(), model()))
    ready_made.add_param_group({"params": []})
    with pytest.warns(IdleWarning, match="a parameter group of this mixture has no parameters"):
        ready_made.add_param_group({"params": iter([])})


def test_parameters_that_were_materialized_elsewhere() -> None:
    with torch.device("meta"):
        net = model()
    optimizer = thalweg.torch.AdamW(net.parameters(), lr=0.1)
    net.weight = torch.nn.Parameter(torch.ones(2, 3))
    net.bias = torch.nn.Parameter(torch.ones(2))
    net(torch.ones(3)).sum().backward()
    with pytest.warns(IdleWarning, match="its 2 parameters are on the meta device"):
        optimizer.step()


def test_parameters_of_another_model() -> None:
    net = model()
    optimizer = thalweg.torch.AdamW(net.parameters(), lr=0.1)
    twin = copy.deepcopy(net)
    for step in range(4):
        twin(torch.ones(3)).sum().backward()
        if step == 1:
            with pytest.warns(IdleWarning, match="none of its 2 parameters has had a gradient in 2 steps; call back"):
                optimizer.step()
        else:
            optimizer.step()


def frozen_in_part(optimizer: Any, net: Any) -> None:
    net.bias.requires_grad_(False)
    net(torch.ones(3)).sum().backward()
    optimizer.step()


def before_backward(optimizer: Any, net: Any) -> None:
    optimizer.step()
    net(torch.ones(3)).sum().backward()
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()


def with_a_closure(optimizer: Any, net: Any) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(lambda: net(torch.ones(3)).sum().backward())


def gradients_without_autograd(optimizer: Any, net: Any) -> None:
    for p in net.parameters():
        p.requires_grad_(False).grad = torch.ones_like(p)
    optimizer.step()


def one_by_one(optimizer: Any, net: Any) -> None:
    """As in the middle of a backward pass; trainers call step() all the same."""
    net(torch.ones(3)).sum().backward()
    for p in net.parameters():
        optimizer.step_parameter(p)
        p.grad = None
    for _ in range(3):
        optimizer.step()


def steps_that_come_late(optimizer: Any, net: Any) -> None:
    """Of two optimizers that take turns: gradients were there, and are none now."""
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.step()


@pytest.mark.parametrize(
    "use",
    [
        frozen_in_part,
        before_backward,
        with_a_closure,
        gradients_without_autograd,
        one_by_one,
        steps_that_come_late,
    ],
)
def test_what_trains_or_will_is_not_warned_of(use: Any) -> None:
    net = model()
    optimizer = thalweg.torch.AdamW([{"params": net.parameters()}, {"params": []}], lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(optimizer, net)
