"""What holds on one device holds for several: under jit, where types tell the sharding, and inside shard_map."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

import sharded_jax_jit
import sharded_jax_lean
import sharded_jax_map
from sharded_jax import check_all

test_under_jit = check_all(sharded_jax_jit)
test_inside_shard_map = check_all(sharded_jax_map)
test_state_in_eight_bits = check_all(sharded_jax_lean)
