"""Kernels for GPUs of what is around a rule; and never one that leaves it out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lanes import one_in
from on_device import FEW, gradients, parameters, side_by_side, train

import thalweg.torch
from thalweg import OptionError
from thalweg.rules import AdamW
from thalweg.rules.ademamix import AdEMAMix

pytestmark = pytest.mark.slow  # programs are interpreted

MATRICES = {"one": (34, 20), "two": (34, 20)}
AROUND: dict[str, dict[str, Any]] = {
    "cautious": dict(cautious=True, weight_decay=0.1),
    "both": dict(cautious="both", weight_decay=0.1),
    "averaged": dict(averaged=0.7, weight_decay=0.1),
    "schedule-free": dict(schedule_free=True, betas=(0.0, 0.9)),
}
KERNELS = [("AdamW", what) for what in AROUND] + [("LAMB", "averaged"), ("LAMB", "cautious")]


@pytest.mark.parametrize(("rule", "what"), one_in(len(KERNELS), KERNELS, first=2))
def test_kernels_are_made_of_it(rule: str, what: str) -> None:
    side_by_side(rule, gradients(2, shapes=FEW), shapes=FEW, **AROUND[what])


def make(rule: str, named: Any, engine: Any, **options: Any) -> Any:
    return getattr(thalweg.torch, rule)(named, lr=0.01, engine=engine, **options)


@pytest.mark.parametrize("rule", one_in(3, ["Muon", "Kron", "SOAP"]))
def test_kernels_written_for_a_rule_leave_nothing_out(rule: str) -> None:
    """They do not know what is around it: such a rule is stepped by operations of torch, and said to be."""
    options: dict[str, Any] = dict(cautious=True, averaged=0.5, weight_decay=0.1)
    options |= dict(ns_dtype=None) if rule == "Muon" else {}
    with pytest.raises(OptionError, match="engine='fused' cannot run"):
        train(
            make(rule, named := parameters(shapes=MATRICES), "fused", **options), named, gradients(1, shapes=MATRICES)
        )
    both = {}
    for engine in ("auto", "reference"):
        named = parameters(shapes=MATRICES)
        optimizer = make(rule, named, engine, **options)
        train(optimizer, named, gradients(2, shapes=MATRICES))
        assert optimizer.engine != "fused"
        both[engine] = [(p.detach(), optimizer.state[p]["average"]) for _, p in named]
    for ours, theirs in zip(both["auto"], both["reference"], strict=True):
        for found, wanted in zip(ours, theirs, strict=True):
            assert (found - wanted).abs().max() <= 2e-4 * wanted.abs().max()


@pytest.mark.parametrize("dtype", one_in(2, ["float32", "bfloat16"]))
def test_the_parts_of_muon_have_an_average(dtype: str) -> None:
    """Its last kernel steps the average too."""
    found, both = parameters(dtype, MATRICES), {}
    for engine in ("fused", "reference"):
        named = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in found]
        optimizer = make("Muon", named, engine, averaged=0.7, weight_decay=0.1, ns_dtype="float32")
        train(optimizer, named, gradients(3, dtype, MATRICES))
        assert optimizer.engine == engine
        both[engine] = [(p.detach().float(), optimizer.state[p]["average"]) for _, p in named]
    for ours, theirs in zip(both["fused"], both["reference"], strict=True):
        for own, wanted, tolerance in zip(ours, theirs, (1e-2 if dtype == "bfloat16" else 2e-5, 2e-5), strict=True):
            assert (own - wanted).abs().max() <= tolerance * wanted.abs().max()


def test_too_many_entries_are_not_for_kernels() -> None:
    named = parameters(shapes=FEW)
    optimizer = make("AdEMAMix", named, "auto", graft=AdEMAMix(), averaged=0.5)
    train(optimizer, named, gradients(1, shapes=FEW))
    assert optimizer.engine == "foreach"
    side_by_side("AdamW", gradients(1, shapes=FEW), shapes=FEW, graft=AdamW(), averaged=0.5)
