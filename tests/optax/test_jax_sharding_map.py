"""Steps inside shard_map, on parts of parameters: the numbers of whole ones."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

import sharded_jax_map
from sharded_jax import fault_of, pairs


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "case"), pairs(sharded_jax_map.cases))
def test_what_holds_on_one_device_holds_for_parts_inside_shard_map(devices: int, case: str) -> None:
    fault = fault_of("sharded_jax_map", devices, case)
    assert not fault, fault
