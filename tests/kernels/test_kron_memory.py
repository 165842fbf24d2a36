"""What a step of Kron needs on a CPU beyond parameters, gradients and state: it does not grow with the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import KRON
from lanes import once
from measured_peaks import allocator_peak, numpy_optimizer, torch_optimizer, traced_peak
from raw_arrays import copies
from side_by_side import draw, draw_gradients, needs_core
from tolerances import SPACE

from thalweg.kernels.chunks import STACK, extent, pieces
from thalweg.numpy import Kron
from thalweg.plan import plan
from thalweg.plan.models import Model, Tensor
from thalweg.show.arguments import Given

pytestmark = pytest.mark.nightly

#: Twenty-two numbers of float32 for each element of a stack, as docs/kron.md says, and Python's own.
BOUND = 22.1 * 4 * STACK
#: Models of many small tensors: their stacks hold 64 of the first, four of the second, whose dense factors count.
MANY: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "square": ([(128, 128)] * 130, {}),
    "dense": ([(4, 512)] * 12, {"max_skew": None}),
    "vectors": ([(16384,)] * 150, {}),
}
each_model = pytest.mark.parametrize(("shapes", "options"), MANY.values(), ids=MANY)


def planned(shapes: list[tuple[int, ...]], options: dict[str, Any], front_end: str, engine: str = "auto") -> int:
    model = Model("many", "", tuple(Tensor(f"p{i}", shape, "float32") for i, shape in enumerate(shapes)))
    given = [Given("Kron", name, value) for name, value in options.items()]
    found = plan(model, optimizers=["Kron"], options=given, front_end=front_end, device="cpu", engine=engine)
    peak = found.costs[0].share.peak_bytes
    assert peak is not None
    return peak


@needs_core
@each_model
def test_stacks_are_bounded_in_torch(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    optimizer, step = torch_optimizer("Kron", shapes, "float32", "auto", options)
    measured = allocator_peak(step, warm_up=1)
    assert optimizer.engine == "fused"
    assert measured < BOUND
    assert measured <= planned(shapes, options, "torch") <= 1.05 * measured


@once(1)
@needs_core
@each_model
def test_numpy_steps_one_tensor_at_a_time(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    optimizer, step = numpy_optimizer("Kron", shapes, "float32", "auto", options)
    measured = traced_peak(step, warm_up=1)
    assert optimizer.engine == "fused"
    assert measured < BOUND


@pytest.mark.parametrize("engine", ["foreach", "fused"])
def test_lists_and_stacks_of_a_larger_model_need_no_more(engine: str) -> None:
    shapes, options = [(8, 1024)], {"max_skew": None}  # with a factor of 4 MiB
    assert planned(shapes * 100, options, "torch", engine) < 1.1 * planned(shapes * 10, options, "torch", engine)


@pytest.mark.parametrize("options", [{}, {"geometry": "quad"}, {"merge": None}])
def test_a_square_matrix_needs_thirteen_times_its_size(options: dict[str, Any]) -> None:
    """Two dense factors, each with its refresh. Noise, and what it was added to, are gone by then."""
    pytest.importorskip("torch")
    _, step = torch_optimizer("Kron", [(256, 256)], "float32", "auto", options)
    assert allocator_peak(step, warm_up=1) < 13.1 * 4 * 256 * 256


def test_the_options_that_need_most() -> None:
    options = dict(whiten="gradient", geometry="eq", weight_decay=0.1, weight_decay_mode="gradient", max_grad_norm=1.0)
    found = planned([(128, 128)] * 130, options, "torch", "fused")
    assert 24.9 * 4 * STACK < found < 25.4 * 4 * STACK


SHAPES = {**{f"m{i}": (6, 4) for i in range(5)}, **{f"s{i}": (8, 8) for i in range(4)}, "v": (7,), "n": ()}


@needs_core
@pytest.mark.parametrize("limit", [1, 50, 60, 150])
def test_the_size_of_stacks_changes_nothing(limit: int) -> None:
    torch = pytest.importorskip("torch")
    import thalweg.torch

    params, grads = draw(SHAPES, "float64"), draw_gradients(SHAPES, "float64", 4)
    expected, found, tensors = copies(params), copies(params), {k: torch.tensor(v) for k, v in params.items()}
    options: dict[str, Any] = dict(lr=KRON.lr, precond_update_probability=0.7)
    reference, fused = (Kron(engine=engine, **options) for engine in ("reference", "fused"))
    in_torch = thalweg.torch.Kron(list(tensors.items()), engine="fused", **options)
    in_torch._engines["lists"].most = limit
    for step in grads:
        reference.step(expected, step)
        fused.step(found, step)
        for name, p in tensors.items():
            p.grad = torch.tensor(step[name])
        in_torch.step()
    for name, p in expected.items():
        assert np.abs(found[name] - p).max() <= SPACE["float64"], name
        assert np.abs(tensors[name].numpy() - p).max() <= SPACE["float64"], name
        for key, entry in reference.state[name].items():
            for other in (fused.state[name][key], in_torch.state[tensors[name]][key].numpy()):
                assert np.abs(other - entry).max() <= SPACE["float64"] * max(1.0, np.abs(entry).max()), (name, key)


def test_pieces() -> None:
    assert [list(p) for p in pieces([3, 3, 3, 9, 1, 1], 6)] == [[0, 1], [2], [3], [4, 5]]
    assert [list(p) for p in pieces([7], 6)] == [[0]]
    assert extent(6, [6, 16]) == 16
    assert extent(0, []) == 1
