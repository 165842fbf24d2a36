"""Numbers of 16 bits on their way in and out: every one of them, and every way to round to one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from raw_arrays import bits
from side_by_side import NARROW, alike, kind, made, needs_core, widened

from thalweg.kernels.cpu.library import is_here, levels, load

pytestmark = needs_core

SGD: dict[str, Any] = dict(trust=False, momentum=0.0)
sixteen_bits = pytest.mark.parametrize("dtype", NARROW)
LEVELS = [] if not is_here() else levels(load())


@pytest.fixture(params=range(len(LEVELS)), ids=LEVELS, autouse=True)
def _at_every_width(request: pytest.FixtureRequest) -> Iterator[None]:
    assert load().thalweg_choose_level(request.param)
    yield
    load().thalweg_choose_level(-1)


def patterns(dtype: str) -> Any:
    """All numbers of 16 bits."""
    return np.arange(2**16, dtype=np.uint16).view(kind(dtype)).copy()


def stepped(start: Any, gradient: Any, engine: str = "fused", **options: Any) -> Any:
    weights = start.copy()
    made("LARS", engine, **{"lr": 1.0, **SGD, **options}).update("w", weights, gradient)
    return weights


def doubtful(dtype: str) -> Any:
    """float32 at, just below and just above the middle between two neighbours, each neighbour, and much else."""
    every = widened(patterns(dtype))
    finite = np.sort(every[np.isfinite(every)])
    middles = ((finite[1:].astype("float64") + finite[:-1]) / 2).astype("float32")
    ends = np.array([65504, 65519.99, 65520, 65536, 3.3895e38, 3.3961e38, 3.4e38, np.inf, np.nan], "float32")
    some = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32).view("float32")
    with np.errstate(all="ignore"):
        near = [np.nextafter(middles, np.float32(way)) for way in (-np.inf, np.inf)]
    return np.concatenate([every, middles, *near, ends, -ends, some])


@sixteen_bits
def test_every_parameter_comes_out_as_it_went_in(dtype: str) -> None:
    every = patterns(dtype)
    finite = np.isfinite(widened(every))
    found = stepped(every, np.zeros(every.shape, "float32"), lr=0.0)
    assert bits(found[finite]) == bits(every[finite])
    alike(found, stepped(every, np.zeros(every.shape, "float32"), "reference", lr=0.0))
    # and through the other rules
    for rule in ("LAMB", "Adafactor"):
        for shape in ((2**16,), (256, 256)):
            small = np.abs(widened(every)) < 1e15  # and can be squared
            weights = np.where(small, every, 0).astype(every.dtype).reshape(shape)
            before = bits(weights)
            made(rule, "fused", lr=0.0).update("w", weights, np.ones(shape, "float32"))
            assert bits(weights) == before, (rule, shape)


@sixteen_bits
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_every_gradient_is_read_exactly(dtype: str, wide: str) -> None:
    every = patterns(dtype)
    found = stepped(np.zeros(every.shape, wide), every)
    with np.errstate(invalid="ignore"):  # of a NaN that signals
        expected = -every.astype(wide)
    assert np.array_equal(found, expected, equal_nan=True)


@sixteen_bits
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_every_state_is_read_exactly(dtype: str, wide: str) -> None:
    every = patterns(dtype)
    weights, zeros = np.zeros(every.shape, wide), np.zeros(every.shape, wide)
    optimizer = made("LARS", "fused", lr=1.0, trust=False, momentum=0.5, momentum_dtype=dtype)
    optimizer.update("w", weights, zeros)
    optimizer.state["w"]["momentum_buffer"][...] = every
    optimizer.update("w", weights, zeros)
    with np.errstate(invalid="ignore"):
        expected = every.astype(wide) * -0.5
    assert np.array_equal(weights, expected, equal_nan=True)


@sixteen_bits
def test_parameters_are_rounded_to_the_nearest_and_ties_to_even(dtype: str) -> None:
    """float16 ends at 65504: from 65520 on it is infinity."""
    x = doubtful(dtype)
    zeros = np.zeros(x.shape, kind(dtype))
    with np.errstate(all="ignore"):
        expected = (np.float32(0) - x).astype(kind(dtype))
    alike(stepped(zeros, x), expected)
    assert np.isinf(expected.astype("float32")).sum() > 10


@sixteen_bits
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_state_is_rounded_as_its_rule_rounds_it(dtype: str, wide: str) -> None:
    """float64 as well: rounded once, and not by way of float32."""
    with np.errstate(all="ignore"):
        x = doubtful(dtype).astype(wide)
        if wide == "float64":
            x = np.concatenate([x, np.nextafter(x, np.inf), np.nextafter(x, -np.inf)])
    stored = {}
    for engine in ("fused", "reference"):
        optimizer = made("LARS", engine, lr=1.0, trust=False, momentum=0.5, momentum_dtype=dtype)
        optimizer.update("w", np.zeros(x.shape, wide), x)
        stored[engine] = optimizer.state["w"]["momentum_buffer"]
    alike(stored["fused"], stored["reference"])


@pytest.mark.parametrize(("wide", "narrow"), [("float64", "float32"), ("float32", "float64")])
def test_between_the_wide_dtypes(wide: str, narrow: str) -> None:
    """A gradient of the other, and state stored in the other, at sizes where float32 ends."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-46, 39, 5000)
    x = (rng.standard_normal(5000) * sizes).astype("float64")
    with np.errstate(all="ignore"):
        gradient = x.astype(wide)
        assert np.array_equal(stepped(np.zeros(5000, narrow), gradient), -gradient.astype(narrow))
        optimizer = made("LARS", "fused", lr=1.0, trust=False, momentum=0.5, state_dtype=narrow)
        optimizer.update("w", np.zeros(5000, wide), gradient)
        expected = gradient.astype(narrow)
    assert np.array_equal(optimizer.state["w"]["momentum_buffer"], expected)
    assert np.isinf(gradient.astype("float64") if narrow == "float64" else expected).any()
