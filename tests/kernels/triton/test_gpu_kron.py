"""Kron's kernels for GPUs in the torch front end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import one_in
from on_device import PRODUCTS, agree_in_products, gradients, parameters, train

import thalweg.torch
from thalweg.errors import OptionError

pytestmark = pytest.mark.slow  # programs are interpreted

SHAPES = {"bias": (5,), "a": (12, 9), "b": (12, 9), "conv": (4, 3, 2, 2)}
#: Where it does not matter which.
FEW = {name: SHAPES[name] for name in ("bias", "a")}
TOLERANCE = PRODUCTS["float32"]


def kron(named: Any, engine: str, **options: Any) -> Any:
    return thalweg.torch.Kron(named, lr=0.05, engine=engine, **options)


#: With options for which there are no kernels by hand: kernels, libraries, kernels. Blocks of unequal size too.
PARTED: dict[str, Any] = dict(damping_mode="expected", block_size=4)
#: `make test` has the first.
ROWS: list[dict[str, Any]] = [
    dict(damping_mode="expected", weight_decay=0.1, weight_decay_mode="update"),
    dict(capturable=True, precond_update_probability=0.4),
    dict(on_nonfinite="skip", max_grad_norm=1.0),
    dict(block_size=5, precond_update_probability=0.6),
    dict(overrides=[("b", dict(weight_decay=0.1))], precond_update_probability=0.4),
    dict(PARTED, weight_decay=0.1),
    dict(geometry="eq", precond_update_probability=0.4),
    dict(block_size=4, averaged=0.9, precond_update_probability=0.6),
    dict(PARTED, momentum_dtype="bfloat16", clip_mode="value"),
    dict(PARTED, max_grad_norm=1.0, maximize=True),
    dict(PARTED, momentum_dtype="int8"),
]


def pair(engine: str = "auto", shapes: Any = SHAPES, **options: Any) -> Any:
    """An optimizer that may use kernels with its parameters, and the reference with its own."""
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    return kron(ours, engine, **options), ours, kron(theirs, "reference", **options), theirs


@pytest.mark.parametrize("options", one_in(len(ROWS), ROWS), ids=str)
def test_the_numbers_of_the_reference(options: dict[str, Any]) -> None:
    fused, ours, reference, theirs = pair("fused", **options)
    steps = gradients(4, shapes=SHAPES)
    train(fused, ours, steps)
    train(reference, theirs, steps)
    agree_in_products(fused, ours, reference, theirs)


@pytest.mark.nightly
def test_tensors_at_different_counts_are_stepped_apart() -> None:
    """One begins later, so that its factors are due in other steps; and options that change are followed."""
    fused, ours, reference, theirs = pair("fused", **PARTED, precond_update_probability=0.5)
    steps = gradients(6, shapes=SHAPES)
    steps[0]["b"] = None
    for optimizer, named in ((fused, ours), (reference, theirs)):
        train(optimizer, named, steps[:3])
        optimizer.param_groups[0].update(precond_lr=0.2, momentum=0.5, lr=0.02)
        train(optimizer, named, steps[3:])
    agree_in_products(fused, ours, reference, theirs)


@pytest.mark.nightly
def test_tables_follow_what_moves() -> None:
    """After a step that was like the one before it, for which nothing was looked up."""
    fused, ours, reference, theirs = pair()
    steps = gradients(3, shapes=SHAPES)
    train(fused, ours, steps[:2])
    old = []
    for _, p in ours:
        old.append(p.data)
        p.data = p.data.clone()
        for key, entry in fused.state[p].items():
            old.append(entry)
            fused.state[p][key] = entry.clone()
    for tensor in old:
        tensor.fill_(float("nan"))
    train(fused, ours, steps[2:])
    train(reference, theirs, steps)
    agree_in_products(fused, ours, reference, theirs)


@pytest.mark.nightly
def test_a_step_like_the_last_is_not_sorted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the host counts Kron's steps."""
    named, steps = parameters(shapes=FEW), gradients(3, shapes=FEW)
    optimizer = kron(named, "auto")
    train(optimizer, named, steps[:1])
    with monkeypatch.context() as patch:
        patch.setattr(optimizer._sorter, "sort", lambda *_, **__: pytest.fail("sorted again"))
        train(optimizer, named, steps[1:])
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}


@pytest.mark.nightly
def test_sets_of_gradients_that_take_turns_follow_gradients_each_by_itself() -> None:
    """Two remembered steps share the tables of a matrix, and gradients that stay where the other step met them."""
    shapes = {"matrix": (6, 5), "vector": (7,)}
    first, second = gradients(2, shapes=shapes)
    results = []
    for engine in ("auto", "reference"):
        named = parameters(shapes=shapes)
        optimizer, (matrix, vector) = kron(named, engine), (p for _, p in named)
        matrix.grad, vector.grad = first["matrix"].clone(), first["vector"].clone()
        optimizer.step()
        matrix.grad, vector.grad = second["matrix"].clone(), None
        optimizer.step()
        vector.grad = second["vector"].clone()  # and that of the matrix is left where it is
        optimizer.step()
        results.append([p.detach().clone() for _, p in named])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max().item() <= TOLERANCE * wanted.abs().max().item()


def test_what_it_does_not_serve_runs_otherwise() -> None:
    named, steps = parameters(shapes={"a": (6, 5)}), gradients(1, shapes={"a": (6, 5)})
    options: dict[str, Any] = dict(geometry="eq", whiten="gradient")
    optimizer = kron(named, "auto", **options)
    train(optimizer, named, steps)
    assert optimizer.engine == "reference"
    with pytest.raises(OptionError, match=r"engine='fused' cannot run for parameter 'a': .*geometry='eq'"):
        train(kron(named, "fused", **options), named, steps)


def test_a_parameter_that_is_not_finite_is_left_alone_without_a_wait() -> None:
    named, steps = parameters(shapes=FEW), gradients(2, shapes=FEW)
    optimizer = kron(named, "auto", on_nonfinite="skip")
    train(optimizer, named, steps[:1])
    before = {name: p.detach().clone() for name, p in named}
    steps[1]["a"][0, 0] = float("nan")
    train(optimizer, named, steps[1:])
    assert all(torch.equal(p, before[name]) for name, p in named)
    assert optimizer.skipped == 1
    assert optimizer.nonfinite() == ["a"]


@pytest.mark.nightly
def test_batches_that_are_at_the_same_step_are_prepared_together() -> None:
    """With factors that are due and that are not, with rates that change, and after one batch has gone its own way."""
    shapes = {"bias": (3,), "a": (4, 3), "b": (4, 3)}
    options: dict[str, Any] = dict(precond_update_probability=0.4, overrides=[("bias", dict(lr_scale=0.5))])
    fused, ours, reference, theirs = pair(shapes=shapes, **options)
    together = []
    for number, step in enumerate(gradients(10, shapes=shapes)):
        for optimizer, named in ((fused, ours), (reference, theirs)):
            optimizer.lr = 0.05 / (1 + number // 3)
            if number == 8:  # the factors of one are due at other steps from now on
                optimizer.state[named[0][1]]["refresh"].fill_(0.15)
            train(optimizer, named, [step])
        (run, _) = fused._latest.runs.runs[0]
        together.append(run.repeats[0][0].together)
    agree_in_products(fused, ours, reference, theirs)
    assert together == [False, False, False, *[True] * 5, False, False]
