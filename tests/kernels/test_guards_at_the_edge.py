"""Where a number of 16 bits ends: the last that can be written, and the first that cannot."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from raw_arrays import bits
from side_by_side import kind, made, needs_core

from thalweg.errors import NonFiniteError

pytestmark = needs_core

policies = pytest.mark.parametrize("policy", ["skip", "raise"])
#: The largest finite number, and what must be added for the least result that is rounded to infinity.
EDGES = {"float16": (65504.0, 2.0**4), "bfloat16": (float.fromhex("0x1.fep127"), 2.0**119)}


def outcome(engine: str, rule: str, weights: Any, gradient: Any, **options: Any) -> Any:
    """What became of a step: whether it was taken, and all bits after it."""
    optimizer, arrays = made(rule, engine, **options), weights.copy()
    try:
        optimizer.update("w", arrays, gradient)
    except NonFiniteError:
        return "refused", bits(arrays), bits(optimizer.state)
    taken = "skipped" if optimizer.skipped["w"] else "taken"
    return taken, bits(arrays), bits(optimizer.state)


@policies
@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_last_parameter_and_the_first_beyond(policy: str, dtype: str, rounding: str) -> None:
    largest, distance = EDGES[dtype]
    for size in (1, 40, 2000):
        for sign, (factor, fits) in itertools.product((1, -1), ((1 - 2**-12, True), (1.0, False), (1.5, False))):
            start, gradient = np.zeros(size, kind(dtype)), np.zeros(size, "float32")
            start[-1], gradient[-1] = sign * largest, -sign
            options: dict[str, Any] = dict(lr=distance * factor, trust=False, momentum=0.0, rounding=rounding)
            found = outcome("fused", "LARS", start, gradient, **options, on_nonfinite=policy)
            assert found == outcome("reference", "LARS", start, gradient, **options, on_nonfinite=policy)
            if rounding == "nearest":
                assert (found[0] == "taken") == fits
            if found[0] != "taken":
                assert found[1] == bits(start)


@policies
@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("value", [65503.0, 65519.0, 65519.996, 65519.9999999, 65520.0, 65521.0, 1e6])
def test_momentum_at_the_end_of_float16(policy: str, wide: str, value: float) -> None:
    gradient = np.zeros(300, wide)
    gradient[7] = value
    options: dict[str, Any] = dict(lr=1.0, trust=False, momentum_dtype="float16", on_nonfinite=policy)
    found = outcome("fused", "LARS", np.zeros(300, wide), gradient, **options)
    assert found == outcome("reference", "LARS", np.zeros(300, wide), gradient, **options)


@policies
@pytest.mark.parametrize("shape", [(40,), (30, 20)], ids=str)
@pytest.mark.parametrize(
    ("rule", "options", "largest"),
    [
        ("LARS", dict(lr=1.0, trust=False), 65504.0),
        ("LAMB", dict(betas=(0.9, 0.75)), 500.0),
        ("LAMB", dict(betas=(0.0, 0.75)), 500.0),
        ("Adafactor", {}, 250.0),
        ("Adafactor", dict(min_dim_size_to_factor=2), 250.0),
    ],
    ids=["LARS", "LAMB", "LAMB without momentum", "Adafactor", "Adafactor factored"],
)
def test_state_that_float16_cannot_hold(policy: str, shape: Any, rule: str, options: dict, largest: float) -> None:
    """As it is stored: gradients, parameters and what is written to them are all finite."""
    seen = set()
    for factor in (0.5, 0.99, 1.0, 1.01, 1.05, 2.0):
        gradient = np.full(shape, largest * factor, "float32")
        given = dict(options, state_dtype="float16", on_nonfinite=policy)
        found = outcome("fused", rule, np.ones(shape, "float32"), gradient, **given)
        expected = outcome("reference", rule, np.ones(shape, "float32"), gradient, **given)
        assert found[0] == expected[0], factor
        if found[0] != "taken":
            assert found == expected
        seen.add(found[0])
    assert len(seen) == 2, "the end was not reached, or never left"


@policies
def test_float32_state_of_float64_may_overflow_as_its_rule_lets_it(policy: str) -> None:
    gradient = np.full(10, 1e100)
    options: dict[str, Any] = dict(lr=1e-100, momentum_mode="lr_outside", trust=False, state_dtype="float32")
    found = outcome("fused", "LARS", np.ones(10), gradient, **options, on_nonfinite=policy)
    assert found == outcome("reference", "LARS", np.ones(10), gradient, **options, on_nonfinite=policy)


@policies
@pytest.mark.parametrize("shape", [(500,), (40, 30)], ids=str)
def test_momentum_that_carries_over_the_edge_by_itself(policy: str, shape: Any) -> None:
    """A gradient of zero, and a parameter that its momentum throws out of float16."""
    for rule, options in {
        "LARS": dict(lr=1.0, trust=False, momentum=0.9),
        "LAMB": dict(lr=1000.0, trust=False, betas=(0.9, 0.9)),
        "Adafactor": dict(lr=500.0, momentum=0.9, clip_threshold=None, scale_parameter=False, min_dim_size_to_factor=2),
    }.items():
        results = []
        for engine in ("fused", "reference"):
            optimizer, weights = made(rule, engine, **options, on_nonfinite=policy), np.zeros(shape, "float16")
            history = []
            for t in range(12):
                weights[...] = np.where(weights < 0, -65_400.0, weights)
                gradient = np.full(shape, 1000.0 if t < 3 else 0.0, "float32")
                before = bits(weights), bits(optimizer.state.get("w", {}))
                try:
                    optimizer.update("w", weights, gradient)
                    taken = not optimizer.skipped["w"] or int(optimizer.state["w"]["step"]) > len(
                        [h for h in history if h]
                    )
                except NonFiniteError:
                    taken = False
                if not taken and history:
                    assert (bits(weights), bits(optimizer.state["w"])) == before
                history.append(taken)
            results.append(history)
        assert results[0] == results[1], rule
        assert set(results[0]) == {True, False}, (rule, results[0])
