"""Kron under ``torch.compile``: it steps as it does without, and a compiler sees nothing of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402

pytestmark = pytest.mark.nightly

SHAPES = [(64, 32), (32,), (16, 64), (8, 3, 3, 3), (10,), (12, 12), (12, 12)]
#: Some of the eight steps refresh the factors, and some do not.
OPTIONS: dict[str, Any] = dict(lr=1e-2, precond_update_probability=0.4)


class Graphs:
    """A backend that compiles nothing, and keeps the names of what it was given."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, module: Any, _inputs: Any) -> Callable[..., Any]:
        nodes = (node for node in module.graph.nodes if node.op.startswith("call_"))
        self.seen.append([getattr(node.target, "__name__", str(node.target)) for node in nodes])
        forward: Callable[..., Any] = module.forward
        return forward


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def drawn(seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizer_and_params(engine: str, rule: str = "Kron", **options: Any) -> tuple[Any, list[Any]]:
    params = [torch.nn.Parameter(p) for p in drawn(0)]
    named = [(f"p{i}", p) for i, p in enumerate(params)]
    given = {**OPTIONS, **options} if rule == "Kron" else {"lr": 1e-2}
    return getattr(thalweg.torch, rule)(named, engine=engine, **given), params


def assert_equal(first: Any, second: Any) -> None:
    """Parameters, state and figures of two optimizers, bit by bit."""
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p, q)
        assert list(first.state[p]) == list(second.state[q])
        assert all(torch.equal(entry, second.state[q][key]) for key, entry in first.state[p].items())
    assert first.stats() == second.stats()
    assert first.engine == second.engine


@pytest.mark.parametrize("engine", ["auto", "reference", "foreach"])
@pytest.mark.parametrize(
    "options",
    [{}, {"geometry": "eq"}, {"on_nonfinite": "skip"}, {"on_nonfinite": "raise"}, {"max_grad_norm": 1.0}],
    ids=str,
)
def test_a_compiled_step_is_the_eager_step(engine: str, options: dict[str, Any]) -> None:
    graphs = Graphs()
    compiled, params = optimizer_and_params(engine, **options)
    eager, others = optimizer_and_params(engine, **options)
    step, refreshes = torch.compile(compiled.step, backend=graphs), []
    for t in range(1, 9):
        for p, q, g in zip(params, others, drawn(t), strict=True):
            p.grad, q.grad = g, g.clone()
        step()
        eager.step()
        assert_equal(compiled, eager)
        refreshes.append(bool(compiled.stats()["p0"]["refreshed"]))
    assert set(refreshes) == {True, False}
    assert graphs.seen == []


@pytest.mark.parametrize("rule", ["Kron", "LAMB"])
def test_a_parameter_stepped_by_itself(rule: str) -> None:
    """A compiler once took every parameter for the second."""
    graphs = Graphs()
    compiled, params = optimizer_and_params("auto", rule)
    eager, others = optimizer_and_params("auto", rule)
    step = torch.compile(compiled.step_parameter, backend=graphs)
    for t in range(1, 4):
        for p, q, g in zip(params, others, drawn(t), strict=True):
            p.grad, q.grad = g, g.clone()
            step(p)
            eager.step_parameter(q)
    assert_equal(compiled, eager)
    assert graphs.seen == []


def trained(compile_with: Callable[[Any], Any], steps: int) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = thalweg.torch.Kron(model.named_parameters(), **OPTIONS)

    def train_step(inputs: Any, targets: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        found = loss.detach()
        loss.backward()
        optimizer.step()
        return found

    step = compile_with(train_step)
    generator = torch.Generator().manual_seed(1)
    batches = [(torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator)) for _ in range(steps)]
    return optimizer, [float(step(*batch)) for batch in batches]


def test_a_train_step_that_is_compiled_as_a_whole() -> None:
    """The model is compiled, once, and the optimizer is not."""
    graphs = Graphs()
    counts = []

    def compiled(function: Any) -> Any:
        step = torch.compile(function, backend=graphs)

        def counted(*batch: Any) -> Any:
            loss = step(*batch)
            counts.append(len(graphs.seen))
            return loss

        return counted

    optimizer, losses = trained(compiled, 6)
    eager, expected = trained(lambda function: function, 6)
    assert losses == expected
    assert_equal(optimizer, eager)
    names = {name for graph in graphs.seen for name in graph}
    assert "linear" in names
    assert not names & {"matmul", "triu", "vector_norm", "argmax", "linalg_solve_triangular", "bitwise_and", "cos"}
    assert counts[-1] == counts[1], f"compiled anew: {counts}"
