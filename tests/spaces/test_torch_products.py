"""Products in the precision that a rule asks for, and bases of columns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from thalweg.spaces import torch as xp
from thalweg.spaces.torch_products import in_precision


def switch() -> Any:
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision if hasattr(matmul, "fp32_precision") else matmul.allow_tf32


@pytest.mark.parametrize("wanted", ["tf32", "float32"])
def test_the_switch_of_the_process_is_put_back(wanted: str) -> None:
    before = switch()
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 2, device="cuda")
        with in_precision(wanted, x):
            assert switch() in (("tf32", True) if wanted == "tf32" else ("ieee", False))
        assert switch() == before
        with pytest.raises(RuntimeError), in_precision(wanted, x):
            x @ torch.empty(3, 3, device="cuda")
        assert switch() == before
        for other in (x.double(), torch.empty(2, 2)):  # of which there are no products in TF32
            with in_precision(wanted, other):
                assert switch() == before


def stack(dtype: Any) -> Any:
    """Matrices with columns that are nearly orthogonal, anything, nearly parallel, partly 0, and one that is the sum of
    others."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 80, 80, generator=generator, dtype=torch.float64)
    x[0] = torch.linalg.qr(x[0])[0] + 0.01 * x[1]
    x[2] = x[2, :, :1] + 1e-4 * x[2]
    x[3, :, 7] = 0
    x[4, :, 9] = x[4, :, 3] + x[4, :, 5]
    scales = torch.logspace(-6, 6, 80, dtype=torch.float64)
    return (x * scales).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_columns_are_those_of_qr_up_to_their_signs(dtype: Any) -> None:
    """As GPUs make them, in blocks of which the last is smaller."""
    x = stack(dtype)
    found, wanted = xp.by_blocks(x, 32), torch.linalg.qr(x)[0]
    digits = torch.finfo(dtype).eps
    # each of 80 columns is a sum of at most 80 products of numbers below 1
    assert (found.mT @ found - torch.eye(80, dtype=dtype)).abs().max() < 80 * digits
    spans = found[:2].mT @ wanted[:2]
    condition = torch.linalg.cond((x / torch.linalg.vector_norm(x, dim=1, keepdim=True))[:2]).max()
    assert (spans.abs() - torch.eye(80, dtype=dtype)).abs().max() < 80 * condition * digits


def test_what_is_not_finite_gives_what_qr_gives() -> None:
    x = stack(torch.float32)
    x[1, 3, 4] = float("nan")
    found = xp.by_blocks(x, 32)
    assert found[1].isnan().any()
    assert torch.equal(found[0], xp.by_blocks(x[:1], 32)[0])
