"""Fused kernels for GPUs and the reference engine over the same tensors, on a GPU if there is one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import side_by_side_torch as beside
import torch
from tolerances import SPACE, TENSOR_CORES

#: Where tensors are: kernels are interpreted on the CPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Smaller and larger than a chunk, one with axes behind those that may be factored. Few: every program is interpreted.
SHAPES = {"number": (), "vector": (2100,), "matrix": (34, 20), "conv": (5, 4, 3, 2), "none": (0, 4)}
#: Still fewer, for tests of which there are many, or that take more steps: the moments of a lone number cancel sooner
#: or later, and then have no digits left to compare.
FEW = {name: SHAPES[name] for name in ("vector", "matrix", "conv")}
#: Of what has been through products of matrices, by the dtype of factors. The interpreter multiplies float32 in full.
PRODUCTS = {**TENSOR_CORES, "float32": SPACE["float32"]} if DEVICE == "cpu" else TENSOR_CORES

Named = Sequence[tuple[str, Any]]


def parameters(dtype: str = "float32", shapes: Mapping[str, Any] = SHAPES) -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(p.detach().to(DEVICE))) for name, p in beside.parameters(dtype, shapes)]


def gradients(steps: int, dtype: str = "float32", shapes: Mapping[str, Any] = SHAPES) -> list[dict[str, Any]]:
    return [{name: g.to(DEVICE) for name, g in step.items()} for step in beside.gradients(steps, dtype, shapes)]


make, train, agree = beside.make, beside.train, beside.agree


def agree_in_products(fused: Any, ours: Named, reference: Any, theirs: Named) -> None:
    """Parameters, state and figures are equal to what products of matrices leave, relative to each tensor."""
    assert fused.engine == "fused"
    tolerance, shown, expected = PRODUCTS["float32"], fused.stats(), reference.stats()
    for (name, p), (_, q) in zip(ours, theirs, strict=True):
        assert list(fused.state[p]) == list(reference.state[q])
        pairs = [(p, q), *((fused.state[p][key], entry) for key, entry in reference.state[q].items())]
        for found, wanted in pairs:
            size = max(1e-3, wanted.abs().max().item())
            assert (found.float() - wanted.float()).abs().max().item() <= tolerance * size, name
        assert list(shown[name]) == list(expected[name])
        for key, value in shown[name].items():
            assert float(value) == pytest.approx(float(expected[name][key]), rel=tolerance), (name, key)


def assert_near(what: str, found: Any, expected: Any, tolerance: float) -> None:
    """Numbers that differ by rounding and by a tolerance, relative to the size of the array."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    a, b = found.detach().float().cpu(), expected.detach().float().cpu()
    assert torch.equal(a.isnan(), b.isnan()), what
    rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[found.dtype]
    size = max(b.nan_to_num().abs().max().item(), 1e-30)
    assert (a - b).nan_to_num().abs().max() <= (tolerance + rounding) * size, what


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Within: an operation that waits for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that this mode does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def on_another_stream() -> Iterator[None]:
    """Within: what is launched is on a stream of its own, as the steps before a capture have to be."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
