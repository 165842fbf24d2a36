"""A compiled function that takes a step: the bits of the step itself, and nothing of it is compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402
from thalweg.check.problem import give, values, weights  # noqa: E402

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
    from torch._dynamo.testing import CompileCounter

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
    seen: list[set[str]] = []

    def backend(module: Any, _: Any) -> Any:
        calls = (node.target for node in module.graph.nodes if node.op.startswith("call_"))
        seen.append({getattr(target, "__name__", str(target)) for target in calls})
        return module.forward

    def train(compile_with: Callable[[Any], Any]) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = getattr(thalweg.torch, rule)(model.named_parameters(), lr=1e-2, engine=engine)

        def train_step(inputs: Any, targets: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            found = loss.detach()
            loss.backward()
            optimizer.step()
            return found

        step, losses, counts = compile_with(train_step), [], []
        for _ in range(6):
            losses.append(float(step(torch.randn(32, 6), torch.randn(32, 1))))
            optimizer.param_groups[0]["lr"] *= 0.9
            counts.append(len(seen))
        return losses, counts

    losses, counts = train(lambda function: torch.compile(function, backend=backend))
    assert losses == train(lambda function: function)[0]
    names = set().union(*seen)
    assert "linear" in names
    assert not names & {
        "matmul",
        "triu",
        "vector_norm",
        "argmax",
        "linalg_solve_triangular",
        "bitwise_and",
        "cos",
        "sqrt",
    }
    assert counts[-1] == counts[1], f"compiled anew: {counts}"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
