"""Steps that are not finite, by native code: it decides as its rule does, to the last number that can be written.

tests/numpy/test_nonfinite_arrays.py has that all else goes on, and that what is refused is not begun.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from raw_arrays import bits
from side_by_side import kind, made, needs_core

from thalweg.errors import NonFiniteError
from thalweg.kernels.threads import set_num_threads

pytestmark = needs_core

guards = pytest.mark.parametrize("policy", ["skip", "raise"])


@pytest.fixture(autouse=True)
def _several_threads() -> Any:
    set_num_threads(2)
    yield
    set_num_threads(None)


def outcomes(rule: str, weights: Any, gradient: Any, **options: Any) -> list[Any]:
    """What became of a step, by native code and by the rule: whether it was taken, and all bits after it."""
    found = []
    for engine in ("fused", "reference"):
        optimizer, arrays = made(rule, engine, **options), weights.copy()
        try:
            optimizer.update("w", arrays, gradient)
            taken = "skipped" if optimizer.skipped["w"] else "taken"
        except NonFiniteError:
            taken = "refused"
        found.append((taken, bits(arrays), bits(optimizer.state)))
    return found


#: The largest finite number, and what must be added for the least result that is rounded to infinity.
EDGES = {"float16": (65504.0, 2.0**4), "bfloat16": (float.fromhex("0x1.fep127"), 2.0**119)}


@guards
@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_last_parameter_and_the_first_beyond(policy: str, dtype: str, rounding: str) -> None:
    largest, distance = EDGES[dtype]
    factors = ((1 - 2**-12, True), (1.0, False), (1.5, False))
    for size, sign, (factor, fits) in itertools.product((1, 40, 2000), (1, -1), factors):
        start, gradient = np.zeros(size, kind(dtype)), np.zeros(size, "float32")
        start[-1], gradient[-1] = sign * largest, -sign
        options: dict[str, Any] = dict(lr=distance * factor, trust=False, momentum=0.0, rounding=rounding)
        found, expected = outcomes("LARS", start, gradient, **options, on_nonfinite=policy)
        assert found == expected
        if rounding == "nearest":
            assert (found[0] == "taken") == fits
        if found[0] != "taken":
            assert found[1] == bits(start)


@guards
def test_momentum_at_the_end_of_its_dtype(policy: str) -> None:
    values = (65503.0, 65519.0, 65519.996, 65519.9999999, 65520.0, 65521.0, 1e6)
    options: dict[str, Any] = dict(trust=False, on_nonfinite=policy)
    for wide, value in itertools.product(("float32", "float64"), values):
        gradient = np.zeros(300, wide)
        gradient[7] = value
        found, expected = outcomes("LARS", np.zeros(300, wide), gradient, lr=1.0, momentum_dtype="float16", **options)
        assert found == expected, (wide, value)
    # float32 state of float64 may overflow as its rule lets it
    options |= dict(lr=1e-100, momentum_mode="lr_outside", state_dtype="float32")
    found, expected = outcomes("LARS", np.ones(10), np.full(10, 1e100), **options)
    assert found == expected


@guards
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
        found, expected = outcomes(rule, np.ones(shape, "float32"), gradient, **given)
        assert found[0] == expected[0], factor
        if found[0] != "taken":
            assert found == expected
        seen.add(found[0])
    assert len(seen) == 2, "the end was not reached, or never left"


@pytest.mark.parametrize("engine", ["reference", "fused"])
@guards
def test_a_ratio_that_float32_cannot_hold(engine: str, policy: str) -> None:
    weights = np.full(4, 1000, np.float32)
    try:
        made("LAMB", engine, lr=1.0, on_nonfinite=policy).update("w", weights, np.full(4, 1e-42, np.float32))
    except NonFiniteError:
        assert policy == "raise"
    assert (weights == 1000).all()
