"""Native code against the rule as it is: state in eight bits, rounded at random, and records of rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import bfloat16
from side_by_side import needs_core

import thalweg.numpy

pytestmark = needs_core

#: Groups of 64, 32 and 16, several blocks of a tensor, and tensors that have none.
SHAPES = {"matrix": (136, 256), "thin": (64, 96), "filter": (48, 16, 3, 3), "odd": (70, 125), "vector": (100,)}
RULES = {
    "LAMB": dict(weight_decay=0.1),
    "LARS": dict(weight_decay=0.1),
    "AdamW": dict(amsgrad=True),
    "Adafactor": dict(momentum=0.9, min_dim_size_to_factor=32),
}


def run(rule: str, engine: str, dtype: Any = "float32", shapes: Any = None, **options: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal(shape).astype(dtype) for name, shape in (shapes or SHAPES).items()}
    optimizer = getattr(thalweg.numpy, rule)(0.01, engine=engine, **{**RULES[rule], **options})
    for _ in range(3):
        grads = {
            name: rng.standard_normal(p.shape) * np.exp(rng.standard_normal(p.shape)) for name, p in params.items()
        }
        optimizer.step(params, {name: g.astype(dtype) for name, g in grads.items()})
    return params, optimizer.state


def assert_alike(found: tuple[Any, Any], wanted: tuple[Any, Any], *, odd: float) -> None:
    """Numbers that are equal up to rounding, and codes that differ by one step in a small share of cases."""
    for name, p in wanted[0].items():
        other, exact = found[0][name].astype("float64"), p.astype("float64")
        assert np.linalg.norm(other - exact) <= 1e-3 * np.linalg.norm(exact)
        for key, entry in wanted[1][name].items():
            own = found[1][name][key]
            assert (own.dtype, own.shape) == (entry.dtype, entry.shape)
            if entry.dtype.kind in "iu" and key != "step":
                apart = np.abs(own.astype(int) - entry.astype(int))
                assert (apart > 0).mean() <= odd, (name, key)
            else:
                np.testing.assert_allclose(own.astype("float64"), entry.astype("float64"), rtol=2e-2, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_codes_are_those_of_the_rule(rule: str, rounding: str) -> None:
    options = dict(state_dtype="int8", state_rounding=rounding)
    assert_alike(run(rule, "auto", **options), run(rule, "reference", **options), odd=1e-3)


@pytest.mark.parametrize("rule", ["LAMB", "AdamW"])
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_of_parameters_in_other_dtypes_and_under_a_guard(rule: str, dtype: str) -> None:
    options: Any = dict(dtype=dtype, state_dtype="int8", on_nonfinite="skip")
    assert_alike(run(rule, "auto", **options), run(rule, "reference", **options), odd=1e-3)


def test_of_stacked_tensors() -> None:
    shapes = {"stack": (3, 64, 128), "vectors": (64, 128)}
    options: Any = dict(shapes=shapes, state_dtype="int8", stacked_axes=1, state_rounding="stochastic")
    found = run("LAMB", "fused", **options)
    assert found[1]["stack"]["exp_avg_scale"].shape == (3, 64, 2)
    assert found[1]["vectors"]["exp_avg"].dtype == np.float32
    assert_alike(found, run("LAMB", "reference", **options), odd=1e-3)


def test_state_of_16_bits_is_rounded_by_the_same_chance() -> None:
    options: Any = dict(state_dtype="float16", state_rounding="stochastic")
    found, wanted = (run("AdamW", engine, **options)[1]["matrix"] for engine in ("fused", "reference"))
    assert all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_records_are_those_of_the_rule(dtype: str) -> None:
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
    options: Any = dict(dtype=kind, rounding="compensated", state_dtype="int8")
    found, wanted = (run("LAMB", engine, **options) for engine in ("auto", "reference"))
    assert_alike(found, wanted, odd=2e-2)
    assert np.abs(found[1]["vector"]["rounding_error"].astype(int)).max() > 100


def test_filters_whose_pieces_cut_groups_are_left_to_the_rule() -> None:
    optimizer = thalweg.numpy.Adafactor(0.01, momentum=0.9, min_dim_size_to_factor=32, state_dtype="int8")
    shape = (64, 64, 3, 3)
    optimizer.update("filter", np.ones(shape, "float32"), np.ones(shape, "float32"))
    assert optimizer.engine == "reference"
    assert optimizer.state["filter"]["exp_avg"].dtype == np.int8
