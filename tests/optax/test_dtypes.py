"""Precision: parameters of 16, 32 and 64 bits, with x64 mode on and off."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tolerances
from optax_runs import MADE, SOON, Tree, assert_alike, every_function

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

W = np.cos(np.arange(12.0)).reshape(4, 3)
DTYPES = ["bfloat16", "float16", "float32", "float64"]


def params_of(dtype: Any) -> Tree:
    return {"w": jnp.asarray(W, dtype), "b": jnp.ones(3, dtype)}


@every_function
def test_statistics_are_float32_unless_parameters_are_wider_or_another_dtype_is_asked_for(name: str) -> None:
    # adafactor's dtype_momentum is float32 unless it is given, as in optax
    wide = dict(dtype_momentum=jnp.float64) if name == "adafactor" else {}
    for dtype, options in (*((dtype, {}) for dtype in DTYPES[:3]), ("float64", wide)):
        state = jax.eval_shape(MADE[name](0.1, **options).init, params_of(dtype))
        assert {x.dtype.name for x in jax.tree.leaves(state._replace(count=None))} == {
            "float64" if dtype == "float64" else "float32"
        }
        assert state.count.dtype == jnp.int32
    field = {"lamb": "exp_avg_sq", "adafactor": "row_var", "lars": "momentum_buffer", "kron": "Q"}[name]
    narrow = jax.eval_shape(MADE[name](0.1, state_dtype=jnp.bfloat16).init, params_of("float32"))
    assert {x.dtype for x in jax.tree.leaves(getattr(narrow, field))} == {jnp.dtype("bfloat16")}


@every_function
def test_updates_have_the_dtype_to_which_parameters_and_gradients_promote(name: str) -> None:
    params, tx = {dtype: jnp.asarray(W, dtype) for dtype in DTYPES}, MADE[name](0.1)
    state = jax.eval_shape(tx.init, params)
    for g_dtype in DTYPES:
        grads = {key: p.astype(g_dtype) for key, p in params.items()}
        updates, _ = jax.eval_shape(tx.update, grads, state, params)
        assert {key: x.dtype for key, x in updates.items()} == {key: jnp.promote_types(key, g_dtype) for key in params}
        assert not any(x.weak_type for x in jax.tree.leaves(updates))


def test_dtypes_of_momentum_go_by_any_of_their_names() -> None:
    params = params_of("float32")
    for dtype in (jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")):
        made = [
            lamb(0.1, momentum_dtype=dtype).init(params).exp_avg["w"],
            lamb(0.1, overrides=[("w", dict(momentum_dtype=dtype))]).init(params).exp_avg["w"],
            kron(0.1, mu_dtype=dtype).init(params).momentum_buffer["w"],
            kron(0.1, precond_dtype=dtype).init(params).Q["w"][0],
            adafactor(0.1, momentum=0.9, dtype_momentum=dtype).init(params).exp_avg["w"],
        ]
        assert {x.dtype.name for x in made} == {"bfloat16"}


WIDE: dict[Any, dict[str, Any]] = {
    partial(adafactor, min_dim_size_to_factor=3): dict(
        eps=1e-30, decay_rate=0.8, clipping_threshold=1.0, weight_decay_rate=0.01, min_scale=1e-3
    ),
    lamb: dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.1, eps_root=0.0, max_grad_norm=1.0),
    lars: dict(momentum=0.9, weight_decay=0.1, trust_coefficient=0.1, eps=0.0, zero_ratio=1.0),
    kron: dict(momentum=0.9, weight_decay=0.1, precond_lr=0.1, eps=1e-8, clip=1.0, damping=1e-9),
}


@pytest.mark.parametrize("factory", WIDE, ids=["adafactor", "lamb", "lars", "kron"])
def test_options_that_are_arrays_of_float64_leave_float32_as_it_is(factory: Any) -> None:
    params = params_of("float32")
    arrays = {key: jnp.asarray(value) for key, value in WIDE[factory].items()}
    assert {x.dtype.name for x in arrays.values()} == {"float64"}
    for lr in (jnp.array(0.1), lambda count: jnp.array(0.1)):
        tx = factory(lr, **arrays)
        made = jax.eval_shape(tx.update, params, tx.init(params), params)
        assert {x.dtype.name for x in jax.tree.leaves(made)} == {"float32", "int32"}
        assert "f64[4,3]" not in str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))
    if factory is lamb:
        plain, own = (
            jax.jit(tx.update, compiler_options=SOON)(params, tx.init(params), params)
            for tx in (lamb(0.1, **WIDE[lamb]), lamb(jnp.array(0.1), **arrays))
        )
        assert_alike(own, plain, tolerances.FLOAT32)


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
from thalweg.optax import adafactor, kron, lamb, lars
assert not jax.config.jax_enable_x64
params = {"w": jnp.cos(jnp.arange(12.0)).reshape(4, 3), "b": np.ones(3), "h": jnp.ones(3, jnp.bfloat16), "s": 1.0}
for solver in (adafactor(0.1, min_dim_size_to_factor=3), lars(jnp.array(0.1)), kron(0.1),
               lamb(np.float64(0.1), rounding="stochastic", seed=2**40 + 3)):
    state = solver.init(params)
    update = jax.jit(solver.update)
    for _ in range(2):
        updates, state = update(params, state, params)
    assert update._cache_size() == 1
    assert updates["w"].dtype == jnp.float32 and updates["h"].dtype == jnp.bfloat16
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((updates, state)))
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
"""


def test_everything_works_without_x64_mode() -> None:
    environment = {**os.environ, "JAX_ENABLE_X64": "0"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
