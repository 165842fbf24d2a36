"""What tests of the optax contract share: the four with options that compile soon, and a small tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from thalweg.optax import adafactor, kron, lamb, lars

Tree = Any
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3, momentum=0.9),
    "lamb": partial(lamb, weight_decay=0.1),
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": partial(kron, damping_mode="expected", max_size_dense=0),
}
each = pytest.mark.parametrize("name", MADE)
PARAMS = {"w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3), "b": jnp.array([1.0, 2.0, -0.5], jnp.float32)}
GRADS = jax.tree.map(lambda p: jnp.sin(3 * p + 1), PARAMS)


def run(tx: Any, params: Tree = PARAMS, grads: Tree = GRADS, steps: int = 2, **extra: Any) -> tuple[Tree, Any]:
    """Parameters and state after some steps, compiled once."""
    state = tx.init(params)
    update = jax.jit(lambda grads, state, params: tx.update(grads, state, params, **extra))
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    return params, state
