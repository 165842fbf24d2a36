"""Rules with factors on GPUs, with options for which there are no kernels by hand: kernels, libraries, kernels."""

from __future__ import annotations

from typing import Any

import pytest
from on_device import agree_in_products, gradients, parameters, train

torch = pytest.importorskip("torch")

import thalweg.torch  # noqa: E402

pytestmark = pytest.mark.slow  # programs are interpreted

#: Blocks of unequal size too, by libraries.
PARTED: dict[str, Any] = dict(damping_mode="expected", block_size=4)
SHAPES = {"bias": (5,), "a": (12, 9), "b": (12, 9), "conv": (4, 3, 2, 2)}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("Kron", dict(PARTED, weight_decay=0.1), marks=pytest.mark.nightly),
        pytest.param("Kron", dict(geometry="eq", precond_update_probability=0.4), marks=pytest.mark.nightly),
        ("Kron", dict(damping_mode="expected", weight_decay=0.1, weight_decay_mode="update")),
        pytest.param(
            "Kron", dict(block_size=4, averaged=0.9, precond_update_probability=0.6), marks=pytest.mark.nightly
        ),
        pytest.param("Kron", dict(PARTED, momentum_dtype="bfloat16", clip_mode="value"), marks=pytest.mark.nightly),
        pytest.param("Kron", dict(PARTED, max_grad_norm=1.0, maximize=True), marks=pytest.mark.nightly),
        pytest.param("Kron", dict(PARTED, momentum_dtype="int8"), marks=pytest.mark.nightly),
        ("Muon", dict(normalize="rows", ns_dtype=None)),
    ],
    ids=str,
)
def test_the_numbers_of_the_reference(kind: str, options: dict[str, Any]) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if kind == "Kron" or len(shape) > 1}
    ours, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    fused, reference = (
        getattr(thalweg.torch, kind)(named, lr=0.05, engine=engine, **options)
        for named, engine in ((ours, "fused"), (theirs, "reference"))
    )
    steps = gradients(5, shapes=shapes)
    train(fused, ours, steps)
    train(reference, theirs, steps)
    agree_in_products(fused, ours, reference, theirs)


@pytest.mark.nightly
def test_tensors_at_different_counts_are_stepped_apart() -> None:
    """One begins later, so that its factors are due in other steps."""
    ours, theirs = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    options: dict[str, Any] = dict(PARTED, precond_update_probability=0.5)
    fused, reference = (
        thalweg.torch.Kron(named, lr=0.05, engine=engine, **options)
        for named, engine in ((ours, "fused"), (theirs, "reference"))
    )
    steps = gradients(5, shapes=SHAPES)
    for step in steps[:1]:
        step["b"] = None
    for optimizer, named in ((fused, ours), (reference, theirs)):
        train(optimizer, named, steps)
    agree_in_products(fused, ours, reference, theirs)


@pytest.mark.nightly
def test_options_that_change_are_followed() -> None:
    ours, theirs = parameters(shapes=SHAPES), parameters(shapes=SHAPES)
    pair = [
        thalweg.torch.Kron(named, lr=0.05, engine=engine, **PARTED)
        for named, engine in ((ours, "fused"), (theirs, "reference"))
    ]
    steps = gradients(6, shapes=SHAPES)
    for optimizer, named in zip(pair, (ours, theirs), strict=True):
        train(optimizer, named, steps[:2])
        optimizer.param_groups[0].update(precond_lr=0.2, momentum=0.5, lr=0.02)
        train(optimizer, named, steps[2:])
    agree_in_products(pair[0], ours, pair[1], theirs)
