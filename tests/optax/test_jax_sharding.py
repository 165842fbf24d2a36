"""Parameters divided over devices by the compiler: the numbers of one device, and state where its parameters are."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

import sharded_jax_jit
from sharded_jax import fault_of, pairs


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "case"), pairs(sharded_jax_jit.cases))
def test_what_holds_on_one_device_holds_for_parameters_divided_over_several(devices: int, case: str) -> None:
    fault = fault_of("sharded_jax_jit", devices, case)
    assert not fault, fault
