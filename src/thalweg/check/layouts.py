"""Shapes of parameters and gradients, and how they lie in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from thalweg.check import expect
from thalweg.check.problem import Shapes, TorchSubject, draw, give, step_unless_refused, train, values, weights

FILTER = (4, 3, 2, 2)


def compare_layout(s: TorchSubject, shape: tuple[int, ...], lay: Callable[[Tensor], Tensor], where: str) -> None:
    """Fail unless a parameter that lies otherwise steps as a contiguous one does."""
    params = [Parameter(lay(weights([shape])[0].detach()))]
    if params[0].is_contiguous():
        pytest.skip("this layout is contiguous here")
    expect.usual(s, train(s.make(params), params, 3), 3, where, 1e-4, shapes=[shape])


def take_shapes(s: TorchSubject, shapes: Shapes) -> None:
    """Fail unless parameters of these shapes move and stay finite."""
    reached = s.run_steps(shapes, 3)
    expect.finite(reached, "after three steps")
    expect.moved(reached, weights(shapes), "after three steps")


def test_transposed(s: TorchSubject) -> None:
    """A transposed parameter steps as a contiguous one does: tied and converted layers have those."""
    compare_layout(s, (6, 4), lambda p: p.t().contiguous().t(), "transposed")


def test_channels_last(s: TorchSubject) -> None:
    """A parameter in channels-last order steps as a contiguous one does."""
    s.require_not("needs_matrices")
    compare_layout(s, FILTER, lambda p: p.contiguous(memory_format=torch.channels_last), "channels last")


def test_gaps_between_elements(s: TorchSubject) -> None:
    """A parameter whose elements do not lie side by side steps as a contiguous one does."""
    compare_layout(s, (6, 4), lambda p: torch.zeros(12, 8)[::2, ::2].copy_(p), "with gaps between its elements")


def test_views_stay_inside(s: TorchSubject) -> None:
    """A parameter that is part of a larger buffer steps as by itself, and the rest of the buffer stays as it is."""
    buffer = draw((30,), 5).float()
    before = buffer.clone()
    view = buffer[3:27].view(6, 4)
    view.copy_(weights([(6, 4)])[0].detach())
    params = [Parameter(view)]
    expect.usual(s, train(s.make(params), params, 3), 3, "within a buffer", 1e-5, shapes=[(6, 4)])
    expect.same(torch.cat([buffer[:3], buffer[27:]]), torch.cat([before[:3], before[27:]]), "around the parameter")


def test_written_in_place(s: TorchSubject) -> None:
    """Parameters are written where they lie: views, tied weights and flat buffers see the step."""
    params = s.weights()
    places = [p.data_ptr() for p in params]
    train(s.make(params), params, 2)
    if [p.data_ptr() for p in params] != places:
        pytest.fail("a parameter lies elsewhere after a step")


def test_gradients_with_other_strides(s: TorchSubject) -> None:
    """A gradient that lies otherwise than its parameter gives the same step."""
    params, optimizer = s.make_fresh(shapes=[(6, 4)])
    for t in range(3):
        give(params, t)
        assert params[0].grad is not None
        params[0].grad = params[0].grad.t().contiguous().t()
        optimizer.step()
    expect.usual(s, params, 3, "with a transposed gradient", 1e-4, shapes=[(6, 4)])


def test_expanded_gradients(s: TorchSubject) -> None:
    """A gradient that is one number expanded, as sum() gives, is read and not written."""
    runs = []
    for lay in (lambda g: g, lambda g: g.contiguous()):
        params = weights([(6, 4)])
        optimizer = s.make(params)
        for t in range(3):
            params[0].grad = lay(draw((1, 1), 1, t).float().expand(6, 4))
            optimizer.step()
        runs.append(values(params))
    expect.close(runs[0], runs[1], weights([(6, 4)]), "with expanded gradients", 1e-4)


def test_empty_parameters(s: TorchSubject) -> None:
    """Parameters without elements are taken, beside others: sharding leaves some."""
    params = weights([(6, 4), (0, 4)])
    reached = train(s.make(params), params, 2)
    if not s.facts.couples_parameters:
        expect.usual(s, reached[:1], 2, "beside an empty one", 1e-5, shapes=[(6, 4)])


def test_scalars(s: TorchSubject) -> None:
    """A parameter without dimensions is stepped: temperatures and gates are."""
    s.require_not("needs_matrices")
    take_shapes(s, [(), (1,)])


def test_thin_shapes(s: TorchSubject) -> None:
    """Rows, columns, single elements and many dimensions are stepped."""
    take_shapes(s, [(1, 7), (7, 1), (1, 1), *([] if s.facts.needs_matrices else [(2, 1, 3), (2, 1, 2, 1, 2)])])


def test_frozen_parameters(s: TorchSubject) -> None:
    """A parameter that requires no gradient may be given, and stays as it is."""
    params, start = s.weights(), s.weights()
    params[0].requires_grad_(False)
    train(s.make(params), params, 2, without=[0])
    expect.same(params[:1], start[:1], "a frozen parameter")
    expect.moved(params[1:], start[1:], "beside a frozen one")


def test_sparse_gradients(s: TorchSubject) -> None:
    """Sparse gradients are refused with a word, or step as dense ones do on the rows they have."""
    params = weights([(6, 4)])
    dense = torch.zeros(6, 4)
    dense[:3] = draw((3, 4), 1).float()
    params[0].grad = dense.to_sparse(1)
    if not step_unless_refused(s.make(params)):
        expect.same(params, weights([(6, 4)]), "after a sparse gradient was refused")
        return
    others = weights([(6, 4)])
    others[0].grad = dense
    s.make(others).step()
    expect.close([params[0][:3]], [others[0][:3]], [weights([(6, 4)])[0][:3]], "with a sparse gradient", 1e-5)


def test_twice_in_two_groups(s: TorchSubject) -> None:
    """One parameter in two groups is refused: it would be stepped twice."""
    params = s.weights()
    groups = [{"params": params}, {"params": params[:1]}]
    expect.refused(lambda: s.make(groups), "a parameter in two groups", (ValueError,))
