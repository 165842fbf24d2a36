"""Parameters whose types say how they are divided: the numbers of one device, and the same types."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

import sharded_jax_explicit
from sharded_jax import fault_of, pairs


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "case"), pairs(sharded_jax_explicit.cases))
def test_what_holds_on_one_device_holds_for_explicit_shardings(devices: int, case: str) -> None:
    fault = fault_of("sharded_jax_explicit", devices, case)
    assert not fault, fault
