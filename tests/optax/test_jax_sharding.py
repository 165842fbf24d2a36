"""What holds on one device holds for several: under jit, inside shard_map, and where types tell the sharding."""

from __future__ import annotations

import pytest

pytest.importorskip("optax")

import sharded_jax_explicit
import sharded_jax_jit
import sharded_jax_lean
import sharded_jax_map
from sharded_jax import check_all

test_parameters_that_the_compiler_shards = pytest.mark.nightly(check_all(sharded_jax_jit.cases))
test_shards_inside_shard_map = check_all(sharded_jax_map.cases)
test_state_in_eight_bits = pytest.mark.nightly(check_all(sharded_jax_lean.cases))
test_shardings_in_types = check_all(sharded_jax_explicit.cases)
