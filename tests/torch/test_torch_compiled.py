"""A compiled function that takes a step: the bits of the step itself, and nothing of it is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import thalweg.torch
from thalweg.check.problem import give, values, weights

pytestmark = pytest.mark.slow


def make(rule: str, engine: str) -> tuple[Any, Any]:
    params = weights([(6, 4), (5, 4), (6, 4)])
    return params, getattr(thalweg.torch, rule)(params, lr=0.01, engine=engine)


def drive(params: Any, steps: int, step: Callable[[], Any]) -> list[Any]:
    for t in range(steps):
        give(params, t)
        step()
    return values(params)


@pytest.mark.parametrize("rule", ["Kron", "LAMB"])
def test_compiled_steps_of_single_parameters(rule: str) -> None:
    """A compiler once took every parameter for the second."""
    torch._dynamo.reset()
    (params, optimizer), (others, eager) = make(rule, "auto"), make(rule, "auto")
    counter = CompileCounter()
    step = torch.compile(optimizer.step_parameter, backend=counter)
    found = drive(params, 3, lambda: [step(p) for p in params])
    assert all(map(torch.equal, found, drive(others, 3, eager.step)))
    assert counter.frame_count == 0


@pytest.mark.parametrize("engine", ["auto", "foreach"])
@pytest.mark.parametrize("rule", ["Kron", "LAMB"])
def test_a_train_step_that_is_compiled_as_a_whole(rule: str, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """The model is compiled, once, the optimizer is not, and nothing is said of it. Of all rules: `thalweg check`."""
    torch._dynamo.reset()
    counter = CompileCounter()

    def train(compile_with: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = getattr(thalweg.torch, rule)(model.named_parameters(), lr=1e-2, engine=engine)

        def train_step(inputs: Any) -> Any:
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            found = loss.detach()
            loss.backward()
            optimizer.step()
            return found

        step, losses = compile_with(train_step), []
        for _ in range(6):
            losses.append(float(step(torch.randn(32, 6))))
            optimizer.param_groups[0]["lr"] *= 0.9
        return losses

    assert train(lambda function: torch.compile(function, backend=counter)) == train(lambda function: function)
    assert 1 <= counter.frame_count <= 2, "compiled anew"
    assert counter.op_count <= 6 * counter.frame_count, "more than the model and its loss"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
