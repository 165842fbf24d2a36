"""What a step of Kron needs on a CPU beyond parameters, gradients and state: it does not grow with the model."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from measured_peaks import allocator_peak
from side_by_side import needs_core

from thalweg.kernels.chunks import STACK
from thalweg.numpy import Kron

pytestmark = pytest.mark.slow

#: Twenty-two numbers of float32 for each element of a stack, and Python's own.
BOUND = 22.1 * 4 * STACK
#: Models of many small tensors: whose dense factors count, and of vectors.
MANY: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "dense": ([(4, 512)] * 12, {"max_skew": None}),
    "vectors": ([(16384,)] * 150, {}),
}
each_model = pytest.mark.parametrize(("shapes", "options"), MANY.values(), ids=MANY)


def stepped(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> Any:
    """An optimizer of torch with gradients, and its state."""
    torch = pytest.importorskip("torch")
    import thalweg.torch

    random, named = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(shapes):
        p = torch.nn.Parameter(torch.randn(shape, generator=random))
        p.grad = torch.randn(shape, generator=random)
        named.append((f"p{i}", p))
    return thalweg.torch.Kron(named, lr=1e-3, **options)


@needs_core
@each_model
def test_stacks_are_bounded_in_torch(shapes: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    optimizer = stepped(shapes, options)
    measured = allocator_peak(optimizer.step, warm_up=1)
    assert optimizer.engine == "fused"
    assert measured < BOUND
    assert measured <= optimizer.explain().temporary_bytes


@needs_core
def test_numpy_steps_one_tensor_at_a_time() -> None:
    shapes, options = MANY["dense"]
    random = np.random.default_rng(0)
    params, grads = (
        {f"p{i}": random.standard_normal(shape).astype("float32") for i, shape in enumerate(shapes)} for _ in range(2)
    )
    optimizer = Kron(lr=1e-3, **options)
    optimizer.step(params, grads)
    tracemalloc.start()
    try:
        optimizer.step(params, grads)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert optimizer.engine == "fused"
    assert most < BOUND
