"""JAX without the 64-bit mode of these tests: float32 and 32-bit integers, traced steps, noise and rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_jax_as_it_comes() -> None:
    pytest.importorskip("jax")
    script = """
import jax, jax.numpy as jnp, numpy as np
from thalweg.boundary import advance
from thalweg.storage import first_state
from thalweg.rules import LAMB, Kron
from thalweg.rules.noise import bits
from thalweg.settings import Handling, Settings
from thalweg.spaces import jax as xj, numpy as xn
assert not jax.config.jax_enable_x64
key = dict(seed=3, tensor=4000000000, t=7)
assert (np.asarray(bits(xj, jnp.zeros((5, 3)), **key)) == bits(xn, np.zeros((5, 3)), **key)).all()
traced = jax.jit(lambda t: bits(xj, jnp.zeros((5, 3)), **{**key, "t": t}))(7)
assert (np.asarray(traced) == bits(xn, np.zeros((5, 3)), **key)).all()
handling = Handling(rounding="stochastic")
p = jnp.ones((6, 4), "bfloat16")
step = jax.jit(lambda p, s, t: advance(xj, Kron(), handling, p, p, s, t=t, lr=0.1, lr_scale=1.0, tensor=5)[:2])
p, s = step(p, first_state(xj, Kron(), handling, p), 1)
assert p.dtype == "bfloat16" and s["Q_1"].dtype == "float32" and (p < 1).all()
jax.jit(lambda decay: Settings(LAMB, {"weight_decay": decay, "betas": (decay, 0.9)}).validate_lr(decay) or decay)(0.1)
"""
    environment = {key: value for key, value in os.environ.items() if key != "JAX_ENABLE_X64"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
