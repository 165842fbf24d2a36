"""Parameters in 16 bits, in float64 and complex, beside one another."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, draw, give, train, unless_refused, weights


def test_dtypes_are_kept(s: TorchSubject) -> None:
    """Parameters keep their dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        params, _ = s.begin(dtype)
        if any(p.dtype != dtype for p in params):
            pytest.fail(f"a parameter in {dtype} is {params[0].dtype} after a step")


def test_bfloat16_moves(s: TorchSubject) -> None:
    """Parameters in bfloat16 move, and stay finite, in ten steps of the lr that was given."""
    params, _ = s.begin(torch.bfloat16, steps=10)
    expect.finite(params, "after ten steps in bfloat16")
    expect.moved(params, s.weights(torch.bfloat16), "after ten steps in bfloat16")


def test_bfloat16_follows_float32(s: TorchSubject) -> None:
    """A run in bfloat16 goes the way of the one in float32: steps are computed in enough digits."""
    start = torch.cat([p.detach().double().flatten() for p in s.weights(torch.bfloat16)])
    ways, steps = [], 10
    for dtype in (torch.float32, torch.bfloat16):
        params = [Parameter(p.detach().to(dtype)) for p in s.weights(torch.bfloat16)]
        ways.append(torch.cat([p.double().flatten() for p in train(s.make(params), params, steps)]) - start)
    seen = ways[0].abs() >= steps * torch.finfo(torch.bfloat16).eps * start.abs()
    if seen.double().mean() < 0.1:
        pytest.skip("steps of this lr are smaller than the spacing of bfloat16")
    cosine = float(torch.nn.functional.cosine_similarity(ways[0][seen], ways[1][seen], dim=0))
    if not cosine > 0.9:
        pytest.fail(f"the cosine between both ways is {cosine:.3f}")


def test_float16_small_gradients(s: TorchSubject) -> None:
    """float16 gradients of 1e-4, whose squares float16 does not hold, give finite steps."""
    params, optimizer = s.make_fresh(torch.float16)
    train(optimizer, params, 3, size=1e-4)
    expect.finite(params, "after float16 gradients of 1e-4")


def test_float16_large_gradients(s: TorchSubject) -> None:
    """float16 gradients of 1000, whose squares float16 does not hold, give finite steps that move."""
    params, optimizer = s.make_fresh(torch.float16)
    train(optimizer, params, 3, size=1000.0)
    expect.finite(params, "after float16 gradients of 1000")
    expect.moved(params, s.weights(torch.float16), "after float16 gradients of 1000")


def test_mixed_dtypes(s: TorchSubject) -> None:
    """A float32 parameter steps the same with a bfloat16 one before it in its group."""
    s.require_not("couples_parameters")
    half, full = weights([(6, 4)], torch.bfloat16, [7]), weights([(6, 4)])
    optimizer = s.make([*half, *full])
    for t in range(3):
        give(half, t, [7])
        give(full, t)
        optimizer.step()
    expect.usual(s, full, 3, "beside a bfloat16 parameter", 1e-5, shapes=[(6, 4)])


def test_float64_is_not_rounded(s: TorchSubject) -> None:
    """A parameter in float64 is never rounded to float32."""
    params, _ = s.begin(torch.float64, steps=1)
    for place, p in enumerate(params):
        if torch.equal(p, p.float().double()):
            pytest.fail(f"parameter {place} has no digits beyond float32 after a step")


def test_default_dtype_ignored(s: TorchSubject) -> None:
    """torch.set_default_dtype(float64) leaves the steps of float32 parameters as they are."""
    plain = s.run_steps(steps=3)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        expect.same(s.run_steps(steps=3), plain, "with float64 as the default dtype")
    finally:
        torch.set_default_dtype(before)


def test_complex_parameters(s: TorchSubject) -> None:
    """Complex parameters are refused, or both their parts move: none is dropped."""
    start = torch.complex(draw((4, 3), 0, 0), draw((4, 3), 0, 1)).to(torch.complex64)
    params = [Parameter(start.clone())]
    with unless_refused("complex parameters"):
        optimizer = s.make(params)
        for t in range(3):
            params[0].grad = torch.complex(draw((4, 3), 1, t), draw((4, 3), 2, t)).to(torch.complex64)
            optimizer.step()
    for part in ("real", "imag"):
        expect.moved([getattr(params[0].detach(), part)], [getattr(start, part)], f"the {part} part")
