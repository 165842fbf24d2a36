"""The GPU engine in the torch front end: what is given to it between steps, and what it leaves alone.

Its numbers are held in tests/engines, what users rely on in test_gpu_checks.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from on_device import DEVICE, FEW, agree, agree_in_products, gradients, make, parameters, train
from side_by_side import RATES

import thalweg.torch
from thalweg.kernels import triton as kernels

pytestmark = pytest.mark.slow  # programs are interpreted

every_rule = pytest.mark.parametrize("rule", RATES)
FACTORED: dict[str, Any] = dict(min_dim_size_to_factor=2, momentum=0.9)


def options_of(rule: str) -> dict[str, Any]:
    return FACTORED if rule == "Adafactor" else dict(weight_decay=0.1)


@pytest.mark.parametrize("rule", ["LAMB", "Adafactor"])
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_what_a_grad_scaler_leaves_with_the_optimizer(rule: str, found: float) -> None:
    """Gradients are divided by the scale, and nothing is changed where one was not finite."""
    (step,) = gradients(1)
    theirs = parameters()
    reference = make(rule, theirs, "reference", **options_of(rule))
    train(reference, theirs, [step])

    named = parameters()
    optimizer = make(rule, named, **options_of(rule))
    optimizer.make_state()
    before = [p.detach().clone() for _, p in named]
    optimizer.grad_scale = torch.tensor(1024.0, device=DEVICE)
    optimizer.found_inf = torch.tensor(found, device=DEVICE)
    train(optimizer, named, [{name: g * 1024 for name, g in step.items()}])
    del optimizer.grad_scale, optimizer.found_inf
    if found:
        assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
        assert not any(entry.any() for _, p in named for entry in optimizer.state[p].values()), "its step among them"
    else:
        agree(optimizer, named, reference, theirs)


def test_without_triton_lists_serve_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_here", lambda: False)
    kernels.warn_once.cache_clear()
    named = parameters()
    try:
        optimizer = make("LAMB", named, "auto")
        with pytest.warns(thalweg.errors.FallbackWarning, match="fused GPU kernels are not available") as caught:
            train(optimizer, named, gradients(1))
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(optimizer, named, gradients(1))
        assert optimizer.engine == "foreach"
    finally:
        kernels.warn_once.cache_clear()


@every_rule
def test_one_parameter_after_the_other(rule: str) -> None:
    """As in a backward pass."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters()
        optimizer = make(rule, named, engine, **options_of(rule))
        for step in gradients(2):
            for name, p in named:
                p.grad = step[name]
                optimizer.step_parameter(p)
        results += [optimizer, named]
    agree(*results)


@pytest.mark.parametrize("options", [FACTORED, dict(factored=False)], ids=["factored", "all squares"])
@pytest.mark.parametrize("rates", [(0.3, None, 0.2), (None, 0.5, 0.0)], ids=str)
def test_adafactor_whose_lr_is_taken_away(options: dict[str, Any], rates: Any) -> None:
    """Then the step size follows from the step; where there never was one, a rate scales it."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("Adafactor", named, engine, lr=rates[0], **options)
        for t, (lr, step) in enumerate(zip(rates, gradients(3, shapes=FEW), strict=True)):
            if t:
                optimizer.param_groups[0]["lr"] = lr
            train(optimizer, named, [step])
        results += [optimizer, named]
    agree(*results)


@pytest.mark.parametrize(("rule", "options"), [("Adafactor", FACTORED), ("AdamW", {}), ("Muon", dict(ns_dtype=None))])
def test_gradients_are_read_where_they_are(rule: str, options: dict[str, Any]) -> None:
    """In steps like the last one, after one whose gradients begin where the widest loads cannot, and after the first
    whose options are others."""
    shapes, results = {"a": (24, 64), "b": (24, 64)}, []
    steps = gradients(5, shapes=shapes)
    steps[3] = {name: torch.cat([g.new_zeros(1), g.reshape(-1)])[1:].view(g.shape) for name, g in steps[3].items()}
    for engine in ("fused", "reference"):
        named = parameters(shapes=shapes)
        optimizer = getattr(thalweg.torch, rule)(named, lr=0.02, engine=engine, **options)
        train(optimizer, named, steps[:4])
        optimizer.param_groups[0]["maximize"] = True
        train(optimizer, named, steps[4:])
        assert optimizer.engine == engine
        results += [optimizer, named]
    if rule == "Muon":
        agree_in_products(*results)
    else:
        agree(*results)


@pytest.mark.parametrize(("rule", "engine"), [("AdamW", "fused"), ("Kron", "reference")])
def test_a_gradient_that_is_not_finite_leaves_all_alone_without_a_wait(rule: str, engine: str) -> None:
    """Steps of Kron are counted on the device then, which the interpreter has on the host: of it, numbers only."""
    shapes = {"bias": (5,), "a": (12, 9)}
    named, steps = parameters(shapes=shapes), gradients(2, shapes=shapes)
    optimizer = getattr(thalweg.torch, rule)(named, lr=0.05, on_nonfinite="skip")
    train(optimizer, named, steps[:1])
    before = {name: p.detach().clone() for name, p in named}
    steps[1]["a"][0, 0] = float("nan")
    train(optimizer, named, steps[1:])
    assert optimizer.engine == engine
    assert all(torch.equal(p, before[name]) for name, p in named)
    assert (optimizer.skipped, optimizer.nonfinite()) == (1, ["a"])
