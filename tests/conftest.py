"""Settings that hold for all tests."""

from __future__ import annotations

import gc
import os
from pathlib import Path

# tests that compare float64 need jax to have it, before jax is imported anywhere
os.environ.setdefault("JAX_ENABLE_X64", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# and tests of sharding eight devices, which are all this CPU
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
# without a GPU, its kernels are interpreted; Triton reads this when it is imported, by whomever
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # environments with one framework only run without it
    pass
else:
    # nothing hangs on how busy the machine is, or on what an earlier run has found
    steady = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    for name, examples in {"few": 5, "day": 25, "all": 400}.items():
        settings.register_profile(name, steady, max_examples=examples)
    settings.load_profile("day")

#: What tests share has no examples of its own.
collect_ignore_glob = ["support/*"]


def pytest_collection_finish() -> None:
    """What is there before the first test stays: no test that collects garbage has to look through it."""
    gc.collect()
    gc.freeze()
