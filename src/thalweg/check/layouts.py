"""How tensors lie in memory, and which shapes they have."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

from thalweg.check.problem import (
    assert_close,
    assert_finite,
    assert_moved,
    assert_refused,
    assert_same,
    draw,
    give,
    make_fresh,
    run_steps,
    train,
    values,
    weights,
)
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.subject import Subject

FILTER = (4, 3, 2, 2)


def compare_layout(s: Subject, shape: tuple[int, ...], lay: Callable[[Tensor], Tensor], where: str) -> None:
    """Fail unless a parameter that lies otherwise steps as a contiguous one does."""
    params = [Parameter(lay(weights([shape])[0].detach()))]
    if params[0].is_contiguous():
        raise NotOffered("this layout is contiguous here")
    assert_close(train(s.make(params), params, 3), run_steps(s, [shape], 3), weights([shape]), where, 1e-4)


@holds("layouts")
def transposed(s: Subject) -> None:
    """A transposed parameter steps as a contiguous one does: tied and converted layers have those."""
    compare_layout(s, (6, 4), lambda p: p.t().contiguous().t(), "transposed")


@holds("layouts")
def channels_last(s: Subject) -> None:
    """A parameter in channels-last order steps as a contiguous one does."""
    s.refuses("needs_matrices", "only matrices are taken")
    compare_layout(s, FILTER, lambda p: p.contiguous(memory_format=torch.channels_last), "channels last")


@holds("layouts")
def gaps_between_elements(s: Subject) -> None:
    """A parameter whose elements do not lie side by side steps as a contiguous one does."""
    compare_layout(s, (6, 4), lambda p: torch.zeros(12, 8)[::2, ::2].copy_(p), "with gaps between its elements")


@holds("layouts")
def views_stay_inside(s: Subject) -> None:
    """A parameter that is part of a larger buffer steps as by itself, and the rest of the buffer stays as it is."""
    buffer = draw((30,), 5).float()
    before = buffer.clone()
    view = buffer[3:27].view(6, 4)
    view.copy_(weights([(6, 4)])[0].detach())
    params = [Parameter(view)]
    assert_close(
        train(s.make(params), params, 3), run_steps(s, [(6, 4)], 3), weights([(6, 4)]), "within a buffer", 1e-5
    )
    assert_same(torch.cat([buffer[:3], buffer[27:]]), torch.cat([before[:3], before[27:]]), "around the parameter")


@holds("layouts")
def written_in_place(s: Subject) -> None:
    """Parameters are written where they lie: views, tied weights and flat buffers see the step."""
    params = weights(s)
    places = [p.data_ptr() for p in params]
    train(s.make(params), params, 2)
    if [p.data_ptr() for p in params] != places:
        raise Failed("a parameter lies elsewhere after a step")


@holds("layouts")
def gradients_with_other_strides(s: Subject) -> None:
    """A gradient that lies otherwise than its parameter gives the same step."""
    params, optimizer = make_fresh(s, shapes=[(6, 4)])
    for t in range(3):
        give(params, t)
        assert params[0].grad is not None
        params[0].grad = params[0].grad.t().contiguous().t()
        optimizer.step()
    assert_close(params, run_steps(s, [(6, 4)], 3), weights([(6, 4)]), "with a transposed gradient", 1e-4)


@holds("layouts")
def expanded_gradients(s: Subject) -> None:
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
def empty_parameters(s: Subject) -> None:
    """Parameters without elements are taken, beside others: sharding leaves some."""
    params = weights([(6, 4), (0, 4)])
    found = train(s.make(params), params, 2)
    if not s.facts.couples_parameters:
        assert_close(found[:1], run_steps(s, [(6, 4)], 2), weights([(6, 4)]), "beside an empty one", 1e-5)


@holds("layouts")
def scalars(s: Subject) -> None:
    """A parameter without dimensions is stepped: temperatures and gates are."""
    s.refuses("needs_matrices", "only matrices are taken")
    shapes: list[tuple[int, ...]] = [(), (1,)]
    found = run_steps(s, shapes, 3)
    assert_finite(found, "after three steps")
    assert_moved(found, weights(shapes), "after three steps")


@holds("layouts")
def thin_shapes(s: Subject) -> None:
    """Rows, columns, single elements and many dimensions are stepped."""
    shapes: list[tuple[int, ...]] = [(1, 7), (7, 1), (1, 1)]
    shapes = shapes if s.facts.needs_matrices else [*shapes, (2, 1, 3), (2, 1, 2, 1, 2)]
    found = run_steps(s, shapes, 3)
    assert_finite(found, "after three steps")
    assert_moved(found, weights(shapes), "after three steps")


@holds("layouts")
def frozen_parameters(s: Subject) -> None:
    """A parameter that requires no gradient may be given, and stays as it is."""
    params = weights(s)
    params[0].requires_grad_(False)
    optimizer = s.make(params)
    for t in range(2):
        give(params[1:], t, range(1, len(params)))
        optimizer.step()
    assert_same(values(params[:1]), values(weights(s)[:1]), "a frozen parameter")
    assert_moved(params[1:], weights(s)[1:], "beside a frozen one")


@holds("layouts")
def sparse_gradients(s: Subject) -> None:
    """Sparse gradients are refused with a word, or step as dense ones do on the rows they have."""
    params = weights([(6, 4)])
    dense = torch.zeros(6, 4)
    dense[:3] = draw((3, 4), 1).float()
    params[0].grad = dense.to_sparse(1)
    optimizer = s.make(params)
    try:
        optimizer.step()
    except Exception as error:
        if not str(error).strip():
            raise Failed(f"{type(error).__name__} without a word") from None
        assert_same(values(params), values(weights([(6, 4)])), "after a sparse gradient was refused")
        return
    others = weights([(6, 4)])
    others[0].grad = dense
    s.make(others).step()
    assert_close([params[0][:3]], [others[0][:3]], [weights([(6, 4)])[0][:3]], "with a sparse gradient", 1e-5)


@holds("layouts")
def twice_in_two_groups(s: Subject) -> None:
    """One parameter in two groups is refused: it would be stepped twice."""
    params = weights(s)
    assert_refused(
        lambda: s.make([{"params": params}, {"params": params[:1]}]), "a parameter in two groups", (ValueError,)
    )
