"""The numbers: engines agree with each other and with numpy, which other tests hold against published optimizers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cases import CASES, OPTION_IDS, OPTIONS, Case
from lanes import by_turns, one_in
from published_runs import error
from tolerances import FLIPPED, FLOAT64, ROUNDED_WALK

torch = pytest.importorskip("torch")

import thalweg.numpy  # noqa: E402
import thalweg.torch  # noqa: E402

pytestmark = pytest.mark.slow

SHAPES = [(), (7,), (6, 4), (4, 9), (6, 4), (3, 4, 5), (6, 1)]
STEPS = 10

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
ENGINES = pytest.mark.parametrize("engine", ["reference", "foreach"])


def make(case: Case, params: Any, engine: str = "reference", **options: Any) -> Any:
    given = {"lr": case.lr, "engine": engine, **case.options["defaults"], **options}
    return getattr(thalweg.torch, case.name)(params, **given)


def named(arrays: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"p{i}", torch.nn.Parameter(torch.as_tensor(a).clone())) for i, a in enumerate(arrays)]


def drive(optimizer: Any, grads: Sequence[Sequence[Any]], step: Callable[[], Any] | None = None) -> list[Any]:
    """The parameters after a step for each row of gradients, as arrays."""
    for row in grads:
        for p, g in zip(optimizer.parameters(), row, strict=True):
            p.grad = torch.as_tensor(g).to(p.dtype)
        (step or optimizer.step)()
    return [
        p.detach().float().numpy() if p.dtype == torch.bfloat16 else p.detach().numpy() for p in optimizer.parameters()
    ]


def small_problem(dtype: str = "float64", shapes: Sequence[Any] = SHAPES, steps: int = STEPS) -> Any:
    rng = np.random.default_rng(1)
    params = [np.asarray(rng.standard_normal(shape)).astype(dtype) for shape in shapes]
    return params, [[np.asarray(rng.standard_normal(p.shape)).astype(dtype) for p in params] for _ in range(steps)]


@by_turns("case")
@pytest.mark.parametrize("engine", ["reference", "auto", "foreach"])
@pytest.mark.parametrize(("case", "description", "options"), one_in(10, OPTIONS, first=1), ids=OPTION_IDS)
def test_engines_equal_numpy(case: Case, description: str, options: dict, engine: str) -> None:
    params, grads = small_problem()
    reference = getattr(thalweg.numpy, case.name)(lr=case.lr, **options)
    current = {f"p{i}": p.copy() for i, p in enumerate(params)}
    for row in grads:
        reference.step(current, {f"p{i}": g for i, g in enumerate(row)})
    optimizer = make(case, named(params), engine, **options)
    assert error(drive(optimizer, grads), list(current.values()), params) < FLOAT64
    assert engine == "auto" or optimizer.engine == engine


@by_turns("options", first=2)
@ENGINES
@EVERY
@pytest.mark.parametrize("options", [dict(max_grad_norm=0.7), dict(maximize=True), dict(on_nonfinite="skip")], ids=str)
def test_handling_equals_numpy(case: Case, engine: str, options: dict) -> None:
    params, grads = small_problem()
    reference = getattr(thalweg.numpy, case.name)(lr=case.lr, **case.options["defaults"], **options)
    current = {f"p{i}": p.copy() for i, p in enumerate(params)}
    for row in grads:
        reference.step(current, {f"p{i}": g for i, g in enumerate(row)})
    found = drive(make(case, named(params), engine, **options), grads)
    assert error(found, list(current.values()), params) < FLOAT64


@by_turns("engine", first=4)
@ENGINES
@EVERY
def test_capturable_gives_the_same_numbers(case: Case, engine: str) -> None:
    params, grads = small_problem()
    capturable = drive(make(case, named(params), engine, capturable=True), grads)
    assert error(capturable, drive(make(case, named(params), engine), grads), params) < FLOAT64


# ---- how tensors lie in memory


@pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
def test_empty_parameters(policy: str) -> None:
    """By lists; `thalweg check` has them where nothing is guarded."""
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in [(0,), (0, 3), (0, 3), (3,)]]
    optimizer = thalweg.torch.LAMB(params, engine="foreach", on_nonfinite=policy)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert params[3].detach().any()
    assert optimizer.skipped == 0


@by_turns("engine", first=12)
@ENGINES
@EVERY
def test_parameters_on_meta(case: Case, engine: str) -> None:
    params = [torch.nn.Parameter(torch.empty(6, 4, device="meta")) for _ in range(2)]
    optimizer = make(case, params, engine)
    for p in params:
        p.grad = torch.empty_like(p)
    optimizer.step()
    optimizer.step()
    assert all(p.device.type == "meta" for p in params)
    assert all(int(optimizer.state[p]["step"]) == 2 for p in params)


# ---- 16 bits


@pytest.mark.nightly
@ENGINES
@EVERY
def test_stochastic_rounding_moves_as_far_as_float32(case: Case, engine: str) -> None:
    steps, size = 200, 32
    options: dict[str, dict] = {
        "LARS": dict(trust=False, momentum=0.0),
        "LAMB": dict(trust=False),
        "Kron": dict(precond_update_probability=0.05),
    }
    moved = {}
    for dtype, rounding in [("float32", "nearest"), ("bfloat16", "stochastic"), ("bfloat16", "nearest")]:
        p = torch.nn.Parameter(torch.ones(size, size, dtype=getattr(torch, dtype)))
        q = torch.nn.Parameter(torch.ones(size, size, dtype=getattr(torch, dtype)))
        optimizer = make(case, [p, q], engine, lr=2e-4, rounding=rounding, **options.get(case.name, {}))
        for _ in range(steps):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
            optimizer.step()
        moved[dtype, rounding] = float((1 - p.detach().float()).mean())
    assert moved["float32", "nearest"] > 1e-3
    assert moved["bfloat16", "stochastic"] == pytest.approx(moved["float32", "nearest"], rel=ROUNDED_WALK)
    assert moved["bfloat16", "nearest"] == 0


@by_turns("engine", first=15)
@ENGINES
@EVERY
def test_rounding_is_the_same_on_both_engines(case: Case, engine: str) -> None:
    values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)]
    runs = []
    for chosen in (engine, "reference"):
        params = [torch.nn.Parameter(v.clone()) for v in values]
        optimizer = make(case, params, chosen, rounding="stochastic", seed=3)
        for step in range(3):
            for p, v in zip(params, values, strict=True):
                p.grad = v * (step + 1)
            optimizer.step()
        runs.append(params)
    for a, b in zip(*runs, strict=True):
        # neighbours at most: a chance that lies between two float32 results may fall either way
        assert (a != b).float().mean() < FLIPPED


# ---- torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["auto", "foreach"])
@EVERY
def test_compiled_steps_run_as_they_are(case: Case, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """A function that takes a step gives the bits of the step itself, is compiled once, and nothing is said of it."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    params, grads = small_problem("float32", shapes=[(6, 4), (5, 4), (5,)], steps=10)
    optimizer, eager = (make(case, named(params), engine) for _ in range(2))
    counter, frames = CompileCounter(), []

    @functools.partial(torch.compile, backend=counter)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return x * 2

    def step() -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        train_step(torch.ones(3))
        frames.append((counter.frame_count, sum(torch._dynamo.utils.counters["frames"].values())))

    def step_eagerly() -> None:
        eager.param_groups[0]["lr"] *= 0.9
        eager.step()

    found = drive(optimizer, grads, step)
    assert all(map(np.array_equal, found, drive(eager, grads, step_eagerly)))
    assert counter.frame_count == 1, "what follows the step, and nothing of it"
    assert frames[-1] == frames[1], f"compiled anew: {frames}"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.nightly
@pytest.mark.parametrize("case", [case for case in CASES if case.name in ("Kron", "LAMB")], ids=lambda case: case.name)
def test_compiled_steps_of_single_parameters(case: Case) -> None:
    """A compiler once took every parameter for the second."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    params, grads = small_problem("float32", steps=3)
    optimizer, eager = (make(case, named(params), "auto") for _ in range(2))
    counter = CompileCounter()
    step = torch.compile(optimizer.step_parameter, backend=counter)
    found = drive(optimizer, grads, lambda: [step(p) for p in optimizer.parameters()])
    assert all(map(np.array_equal, found, drive(eager, grads)))
    assert counter.frame_count == 0


@pytest.mark.nightly
def test_a_train_step_that_is_compiled_as_a_whole() -> None:
    """The model is compiled, once, and Kron is not."""
    torch._dynamo.reset()
    seen: list[set[str]] = []

    def backend(module: Any, _: Any) -> Any:
        calls = (node.target for node in module.graph.nodes if node.op.startswith("call_"))
        seen.append({getattr(target, "__name__", str(target)) for target in calls})
        return module.forward

    def train(compile_with: Callable[[Any], Any]) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        optimizer = thalweg.torch.Kron(model.named_parameters(), lr=1e-2, precond_update_probability=0.4)

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
            counts.append(len(seen))
        return losses, counts

    losses, counts = train(lambda function: torch.compile(function, backend=backend))
    assert losses == train(lambda function: function)[0]
    names = set().union(*seen)
    assert "linear" in names
    assert not names & {"matmul", "triu", "vector_norm", "argmax", "linalg_solve_triangular", "bitwise_and", "cos"}
    assert counts[-1] == counts[1], f"compiled anew: {counts}"
