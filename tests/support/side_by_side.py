"""Native code and the reference: what tests that step by themselves need, and what must agree."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from agree import UNITS, assert_alike, dtype_of
from raw_arrays import FRONT_END, Arrays

from thalweg.kernels.cpu.library import is_here
from thalweg.numpy import Optimizer

needs_core = pytest.mark.skipif(not is_here(), reason="no native core")

#: Rules that differ in passes and in state, with rates at which their steps are of moderate size.
RATES: dict[str, float] = {"LARS": 5.0, "LAMB": 0.02, "Adafactor": 0.05}
every_rule = pytest.mark.parametrize("rule", RATES)
DTYPES = ["float64", "float32", "bfloat16", "float16"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
NARROW = ("bfloat16", "float16")
#: Of the results of several steps, to which roundings of each add.
UNITS_OF_STEPS = 2 * UNITS
kind = dtype_of


def widened(x: Any) -> Any:
    """x in float32; of 16 bits there are NaNs at which the instructions of some processors report an invalid value."""
    with np.errstate(invalid="ignore"):
        return x.astype("float32")


def alike(found: Any, expected: Any) -> None:
    """Equal numbers of 16 bits to the bit, but that one NaN is as good as another."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    unknown = np.isnan(widened(expected))
    assert np.array_equal(np.isnan(widened(found)), unknown)
    found, expected = found[~unknown], expected[~unknown]
    wrong = np.flatnonzero(found.view(np.uint16) != expected.view(np.uint16))
    assert not wrong.size, f"{wrong.size} differ: {found[wrong[:3]]} for {expected[wrong[:3]]}"


def made(rule: str, engine: str, **options: Any) -> Optimizer:
    return FRONT_END[rule](**{"lr": RATES.get(rule, 0.01), **options}, engine=engine)


class Both(NamedTuple):
    """Two optimizers after the same steps."""

    fused: Optimizer
    reference: Optimizer
    found: Arrays
    expected: Arrays

    def agree(self) -> None:
        """Parameters, all of the state and all figures are equal, to rounding."""
        assert self.fused.skipped == self.reference.skipped
        both = (self.fused, self.found), (self.reference, self.expected)
        assert_alike(*((arrays, optimizer.state, optimizer.stats()) for optimizer, arrays in both), UNITS_OF_STEPS)
