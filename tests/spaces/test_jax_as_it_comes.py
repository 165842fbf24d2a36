"""JAX without the 64-bit mode of these tests: its random bits are those of numpy. tests/optax has steps."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_random_bits_of_jax_as_it_comes() -> None:
    pytest.importorskip("jax")
    script = """
import jax, jax.numpy as jnp, numpy as np
from thalweg.rules.noise import bits
from thalweg.spaces import jax as xj, numpy as xn
assert not jax.config.jax_enable_x64
key = dict(seed=3, tensor=4000000000, t=7)
assert (np.asarray(bits(xj, jnp.zeros((5, 3)), **key)) == bits(xn, np.zeros((5, 3)), **key)).all()
traced = jax.jit(lambda t: bits(xj, jnp.zeros((5, 3)), **{**key, "t": t}))(7)
assert (np.asarray(traced) == bits(xn, np.zeros((5, 3)), **key)).all()
"""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_ENABLE_X64"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
