"""A network learns with thalweg.optax: far below the first loss, and below plain SGD at equal steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

import thalweg.optax as ours  # noqa: E402

pytestmark = pytest.mark.nightly

STEPS = 300
#: How much of the first loss may be left.
LEFT = 0.1
#: Each has a learning rate that suits it, warmed up for a tenth of the steps and falling to zero.
RATES = {"adafactor": 0.1, "lamb": 0.01, "lars": 5.0, "kron": 0.003}


def trained(transformation: Any, params: Any, loss: Callable[[Any, Any], Any], batches: Any) -> Any:
    """The loss of every batch before its step."""

    def step(carry: Any, batch: Any) -> Any:
        p, state = carry
        value, grads = jax.value_and_grad(loss)(p, batch)
        updates, state = transformation.update(grads, state, p)
        return (optax.apply_updates(p, updates), state), value

    return jax.lax.scan(step, (params, transformation.init(params)), batches)[1]


def ends(losses: Any) -> tuple[float, float]:
    """The mean of the first five and of the last twenty losses."""
    return float(np.mean(losses[:5])), float(np.mean(losses[-20:]))


def dense(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    w = rng.standard_normal((rows, columns)) / np.sqrt(rows)
    return {"w": jnp.asarray(w, "float32"), "bias": jnp.zeros(columns, "float32")}


def mlp(layers: Any, x: Any) -> Any:
    for layer in layers[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["bias"])
    return x @ layers[-1]["w"] + layers[-1]["bias"]


def imitation() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    teacher, params = ([dense(rng, *sizes) for sizes in ((8, 32), (32, 32), (32, 4))] for _ in range(2))
    x = jnp.asarray(rng.standard_normal((STEPS, 64, 8)), "float32")

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((mlp(p, batch) - 2 * mlp(teacher, batch)) ** 2)

    return params, loss, x


@pytest.mark.parametrize("name", RATES)
def test_a_network_learns_to_imitate_another(name: str) -> None:
    params, loss, batches = imitation()
    rate = optax.warmup_cosine_decay_schedule(0.0, RATES[name], STEPS // 10, STEPS)
    first, last = ends(jax.jit(lambda p, b: trained(getattr(ours, name)(rate), p, loss, b))(params, batches))
    by_sgd = jax.jit(jax.vmap(lambda rate: trained(optax.sgd(rate), params, loss, batches)))
    rates = jnp.asarray([0.03, 0.1, 0.3, 1.0], "float32")
    assert last < LEFT * first, (first, last)
    assert last < min(sgd for _, sgd in map(ends, by_sgd(rates)) if np.isfinite(sgd))
