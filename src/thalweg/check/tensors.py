"""Tensors of all kinds: dtypes, shapes, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from thalweg.check.problem import (
    Shapes,
    TorchSubject,
    assert_close,
    assert_finite,
    assert_moved,
    assert_refused,
    assert_same,
    assert_usual,
    draw,
    give,
    step_unless_refused,
    train,
    unless_refused,
    values,
    weights,
)
from thalweg.check.registry import Failed, NotOffered, holds

FILTER = (4, 3, 2, 2)


@holds("dtypes")
def dtypes_are_kept(s: TorchSubject) -> None:
    """Parameters keep their dtype."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        params, _ = s.begin(dtype)
        if any(p.dtype != dtype for p in params):
            raise Failed(f"a parameter in {dtype} is {params[0].dtype} after a step")


@holds("dtypes")
def bfloat16_moves(s: TorchSubject) -> None:
    """Parameters in bfloat16 move, and stay finite, in ten steps of the lr that was given."""
    params, _ = s.begin(torch.bfloat16, steps=10)
    assert_finite(params, "after ten steps in bfloat16")
    assert_moved(params, s.weights(torch.bfloat16), "after ten steps in bfloat16")


@holds("dtypes")
def bfloat16_follows_float32(s: TorchSubject) -> None:
    """A run in bfloat16 goes the way of the one in float32: steps are computed in enough digits."""
    start = torch.cat([p.detach().double().flatten() for p in s.weights(torch.bfloat16)])
    ways, steps = [], 10
    for dtype in (torch.float32, torch.bfloat16):
        params = [Parameter(p.detach().to(dtype)) for p in s.weights(torch.bfloat16)]
        ways.append(torch.cat([p.double().flatten() for p in train(s.make(params), params, steps)]) - start)
    seen = ways[0].abs() >= steps * torch.finfo(torch.bfloat16).eps * start.abs()
    if seen.double().mean() < 0.1:
        raise NotOffered("steps of this lr are smaller than the spacing of bfloat16")
    cosine = float(torch.nn.functional.cosine_similarity(ways[0][seen], ways[1][seen], dim=0))
    if not cosine > 0.9:
        raise Failed(f"the cosine between both ways is {cosine:.3f}")


@holds("dtypes")
def float16_small_gradients(s: TorchSubject) -> None:
    """float16 gradients of 1e-4, whose squares float16 does not hold, give finite steps."""
    params, optimizer = s.make_fresh(torch.float16)
    train(optimizer, params, 3, size=1e-4)
    assert_finite(params, "after float16 gradients of 1e-4")


@holds("dtypes")
def float16_large_gradients(s: TorchSubject) -> None:
    """float16 gradients of 1000, whose squares float16 does not hold, give finite steps that move."""
    params, optimizer = s.make_fresh(torch.float16)
    train(optimizer, params, 3, size=1000.0)
    assert_finite(params, "after float16 gradients of 1000")
    assert_moved(params, s.weights(torch.float16), "after float16 gradients of 1000")


@holds("dtypes", without="couples_parameters")
def mixed_dtypes(s: TorchSubject) -> None:
    """A float32 parameter steps the same with a bfloat16 one before it in its group."""
    half, full = weights([(6, 4)], torch.bfloat16, [7]), weights([(6, 4)])
    optimizer = s.make([*half, *full])
    for t in range(3):
        give(half, t, [7])
        give(full, t)
        optimizer.step()
    assert_usual(s, full, 3, "beside a bfloat16 parameter", 1e-5, shapes=[(6, 4)])


@holds("dtypes")
def float64_is_not_rounded(s: TorchSubject) -> None:
    """A parameter in float64 is never rounded to float32."""
    params, _ = s.begin(torch.float64, steps=1)
    for place, p in enumerate(params):
        if torch.equal(p, p.float().double()):
            raise Failed(f"parameter {place} has no digits beyond float32 after a step")


@holds("dtypes")
def default_dtype_ignored(s: TorchSubject) -> None:
    """torch.set_default_dtype(float64) leaves the steps of float32 parameters as they are."""
    plain = s.run_steps(steps=3)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert_same(s.run_steps(steps=3), plain, "with float64 as the default dtype")
    finally:
        torch.set_default_dtype(before)


@holds("dtypes")
def complex_parameters(s: TorchSubject) -> None:
    """Complex parameters are refused, or both their parts move: none is dropped."""
    start = torch.complex(draw((4, 3), 0, 0), draw((4, 3), 0, 1)).to(torch.complex64)
    params = [Parameter(start.clone())]
    with unless_refused("complex parameters"):
        optimizer = s.make(params)
        for t in range(3):
            params[0].grad = torch.complex(draw((4, 3), 1, t), draw((4, 3), 2, t)).to(torch.complex64)
            optimizer.step()
    for part in ("real", "imag"):
        assert_moved([getattr(params[0].detach(), part)], [getattr(start, part)], f"the {part} part")


# ---- layouts and shapes


def compare_layout(s: TorchSubject, shape: tuple[int, ...], lay: Callable[[Tensor], Tensor], where: str) -> None:
    """Fail unless a parameter that lies otherwise steps as a contiguous one does."""
    params = [Parameter(lay(weights([shape])[0].detach()))]
    if params[0].is_contiguous():
        raise NotOffered("this layout is contiguous here")
    assert_usual(s, train(s.make(params), params, 3), 3, where, 1e-4, shapes=[shape])


def take_shapes(s: TorchSubject, shapes: Shapes) -> None:
    """Fail unless parameters of these shapes move and stay finite."""
    found = s.run_steps(shapes, 3)
    assert_finite(found, "after three steps")
    assert_moved(found, weights(shapes), "after three steps")


@holds("layouts")
def transposed(s: TorchSubject) -> None:
    """A transposed parameter steps as a contiguous one does: tied and converted layers have those."""
    compare_layout(s, (6, 4), lambda p: p.t().contiguous().t(), "transposed")


@holds("layouts", without="needs_matrices")
def channels_last(s: TorchSubject) -> None:
    """A parameter in channels-last order steps as a contiguous one does."""
    compare_layout(s, FILTER, lambda p: p.contiguous(memory_format=torch.channels_last), "channels last")


@holds("layouts")
def gaps_between_elements(s: TorchSubject) -> None:
    """A parameter whose elements do not lie side by side steps as a contiguous one does."""
    compare_layout(s, (6, 4), lambda p: torch.zeros(12, 8)[::2, ::2].copy_(p), "with gaps between its elements")


@holds("layouts")
def views_stay_inside(s: TorchSubject) -> None:
    """A parameter that is part of a larger buffer steps as by itself, and the rest of the buffer stays as it is."""
    buffer = draw((30,), 5).float()
    before = buffer.clone()
    view = buffer[3:27].view(6, 4)
    view.copy_(weights([(6, 4)])[0].detach())
    params = [Parameter(view)]
    assert_usual(s, train(s.make(params), params, 3), 3, "within a buffer", 1e-5, shapes=[(6, 4)])
    assert_same(torch.cat([buffer[:3], buffer[27:]]), torch.cat([before[:3], before[27:]]), "around the parameter")


@holds("layouts")
def written_in_place(s: TorchSubject) -> None:
    """Parameters are written where they lie: views, tied weights and flat buffers see the step."""
    params = s.weights()
    places = [p.data_ptr() for p in params]
    train(s.make(params), params, 2)
    if [p.data_ptr() for p in params] != places:
        raise Failed("a parameter lies elsewhere after a step")


@holds("layouts")
def gradients_with_other_strides(s: TorchSubject) -> None:
    """A gradient that lies otherwise than its parameter gives the same step."""
    params, optimizer = s.make_fresh(shapes=[(6, 4)])
    for t in range(3):
        give(params, t)
        assert params[0].grad is not None
        params[0].grad = params[0].grad.t().contiguous().t()
        optimizer.step()
    assert_usual(s, params, 3, "with a transposed gradient", 1e-4, shapes=[(6, 4)])


@holds("layouts")
def expanded_gradients(s: TorchSubject) -> None:
    """A gradient that is one number expanded, as sum() gives, is read and not written."""
    runs = []
    for lay in (lambda g: g, lambda g: g.contiguous()):
        params = weights([(6, 4)])
        optimizer = s.make(params)
        for t in range(3):
            params[0].grad = lay(draw((1, 1), 1, t).float().expand(6, 4))
            optimizer.step()
        runs.append(values(params))
    assert_close(runs[0], runs[1], weights([(6, 4)]), "with expanded gradients", 1e-4)


@holds("layouts")
def empty_parameters(s: TorchSubject) -> None:
    """Parameters without elements are taken, beside others: sharding leaves some."""
    params = weights([(6, 4), (0, 4)])
    found = train(s.make(params), params, 2)
    if not s.facts.couples_parameters:
        assert_usual(s, found[:1], 2, "beside an empty one", 1e-5, shapes=[(6, 4)])


@holds("layouts", without="needs_matrices")
def scalars(s: TorchSubject) -> None:
    """A parameter without dimensions is stepped: temperatures and gates are."""
    take_shapes(s, [(), (1,)])


@holds("layouts")
def thin_shapes(s: TorchSubject) -> None:
    """Rows, columns, single elements and many dimensions are stepped."""
    take_shapes(s, [(1, 7), (7, 1), (1, 1), *([] if s.facts.needs_matrices else [(2, 1, 3), (2, 1, 2, 1, 2)])])


@holds("layouts")
def frozen_parameters(s: TorchSubject) -> None:
    """A parameter that requires no gradient may be given, and stays as it is."""
    params, start = s.weights(), s.weights()
    params[0].requires_grad_(False)
    optimizer = s.make(params)
    for t in range(2):
        give(params[1:], t, range(1, len(params)))
        optimizer.step()
    assert_same(params[:1], start[:1], "a frozen parameter")
    assert_moved(params[1:], start[1:], "beside a frozen one")


@holds("layouts")
def sparse_gradients(s: TorchSubject) -> None:
    """Sparse gradients are refused with a word, or step as dense ones do on the rows they have."""
    params = weights([(6, 4)])
    dense = torch.zeros(6, 4)
    dense[:3] = draw((3, 4), 1).float()
    params[0].grad = dense.to_sparse(1)
    if not step_unless_refused(s.make(params)):
        assert_same(params, weights([(6, 4)]), "after a sparse gradient was refused")
        return
    others = weights([(6, 4)])
    others[0].grad = dense
    s.make(others).step()
    assert_close([params[0][:3]], [others[0][:3]], [weights([(6, 4)])[0][:3]], "with a sparse gradient", 1e-5)


@holds("layouts")
def twice_in_two_groups(s: TorchSubject) -> None:
    """One parameter in two groups is refused: it would be stepped twice."""
    params = s.weights()
    groups = [{"params": params}, {"params": params[:1]}]
    assert_refused(lambda: s.make(groups), "a parameter in two groups", (ValueError,))
