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
import optax
import pytest
import tolerances
from lanes import by_turns, once
from optax_runs import MADE, Tree, each

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

W = np.cos(np.arange(12.0)).reshape(4, 3)
DTYPES = ["bfloat16", "float16", "float32", "float64"]


def params_of(dtype: Any) -> Tree:
    return {"w": jnp.asarray(W, dtype), "b": jnp.ones(3, dtype)}


def abstract_step(tx: Any, params: Tree, grads: Tree) -> tuple[Tree, Any]:
    return jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)


@each
def test_statistics_are_float32_unless_parameters_are_wider_or_another_dtype_is_asked_for(name: str) -> None:
    # adafactor's dtype_momentum is float32 unless it is given, as in optax
    wide = dict(dtype_momentum=jnp.float64) if name == "adafactor" else {}
    for dtype, options in (*((dtype, {}) for dtype in DTYPES[:3]), ("float64", wide)):
        tx = MADE[name](0.1, **options)
        state = jax.eval_shape(tx.init, params_of(dtype))
        assert {x.dtype.name for x in jax.tree.leaves(state._replace(count=None))} == {
            "float64" if dtype == "float64" else "float32"
        }
        assert state.count.dtype == jnp.int32
    field = {"lamb": "exp_avg_sq", "adafactor": "row_var", "lars": "momentum_buffer", "kron": "Q"}[name]
    narrow = jax.eval_shape(MADE[name](0.1, state_dtype=jnp.bfloat16).init, params_of("float32"))
    assert {x.dtype for x in jax.tree.leaves(getattr(narrow, field))} == {jnp.dtype("bfloat16")}


@by_turns("g_dtype")
@each
@pytest.mark.parametrize("g_dtype", DTYPES)
def test_updates_have_the_dtype_to_which_parameters_and_gradients_promote(name: str, g_dtype: Any) -> None:
    params = {str(d): jnp.asarray(W, d) for d in DTYPES}
    updates, _ = abstract_step(MADE[name](0.1), params, {key: p.astype(g_dtype) for key, p in params.items()})
    assert {key: x.dtype for key, x in updates.items()} == {key: jnp.promote_types(key, g_dtype) for key in params}
    assert not any(x.weak_type for x in jax.tree.leaves(updates))


def test_dtypes_of_momentum_go_by_any_of_their_names() -> None:
    params = params_of("float32")
    for dtype in (jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")):
        found = [
            lamb(0.1, momentum_dtype=dtype).init(params).exp_avg["w"],
            lars(0.1, momentum_dtype=dtype).init(params).momentum_buffer["w"],
            kron(0.1, mu_dtype=dtype).init(params).momentum_buffer["w"],
            kron(0.1, precond_dtype=dtype).init(params).Q["w"][0],
            adafactor(0.1, momentum=0.9, dtype_momentum=dtype).init(params).exp_avg["w"],
        ]
        assert {x.dtype.name for x in found} == {"bfloat16"}


@by_turns("dtype", first=5)
@each
@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_gradients_of_zero_and_tiny_ones_make_no_nan(name: str, dtype: Any) -> None:
    params, tx = {"w": jnp.asarray(W, dtype)}, MADE[name](0.01)
    state, update = tx.init(params), jax.jit(tx.update)
    for size in (0.0, 0.0, 6e-8, 0.0):
        updates, state = update({"w": jnp.full((4, 3), size, dtype)}, state, params)
        assert jnp.isfinite(updates["w"]).all()
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


WIDE: dict[Any, dict[str, Any]] = {
    partial(adafactor, min_dim_size_to_factor=3): dict(
        eps=1e-30, decay_rate=0.8, clipping_threshold=1.0, weight_decay_rate=0.01, min_scale=1e-3
    ),
    lamb: dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.1, eps_root=0.0, max_grad_norm=1.0),
    lars: dict(momentum=0.9, weight_decay=0.1, trust_coefficient=0.1, eps=0.0, zero_ratio=1.0),
    kron: dict(momentum=0.9, weight_decay=0.1, precond_lr=0.1, eps=1e-8, clip=1.0, damping=1e-9),
}


@once(2)
@pytest.mark.parametrize("factory", WIDE, ids=["adafactor", "lamb", "lars", "kron"])
def test_options_that_are_arrays_of_float64_leave_float32_as_it_is(factory: Any) -> None:
    params = params_of("float32")
    arrays = {key: jnp.asarray(value) for key, value in WIDE[factory].items()}
    assert {x.dtype.name for x in arrays.values()} == {"float64"}
    found = []
    for options, lr in ((WIDE[factory], 0.1), (arrays, jnp.array(0.1)), (arrays, lambda count: jnp.array(0.1))):
        tx = factory(lr, **options)
        state = tx.init(params)
        updates, after = jax.jit(tx.update)(params, state, params)
        assert {x.dtype for x in jax.tree.leaves((updates, after))} == {jnp.dtype("float32"), jnp.dtype("int32")}
        assert "f64[4,3]" not in str(jax.make_jaxpr(tx.update)(params, state, params))
        found.append(updates["w"])
    size = float(jnp.abs(found[0]).max())
    assert all(float(jnp.abs(x - found[0]).max()) <= tolerances.FLOAT32 * size for x in found[1:])


@by_turns(first=7)
@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=pytest.mark.nightly)])
def test_stochastic_rounding_moves_parameters_right_on_average(name: str, dtype: Any) -> None:
    factory = {"adafactor": adafactor, "lamb": lamb, "lars": partial(lars, trust_coefficient=1.0, momentum=0.0)}[name]
    lr = {jnp.bfloat16: 2.0**-12, jnp.float16: 2.0**-15}[dtype]  # a sixteenth of the distance between neighbours
    params = jnp.ones(2000, dtype)
    for rounding, share in (("nearest", 0.0), ("stochastic", 1.0)):
        tx = factory(lr, rounding=rounding)

        def body(carry: Any, _: Any, tx: Any = tx) -> tuple[Any, None]:
            p, state = carry
            updates, state = tx.update(jnp.ones(2000, dtype), state, p)
            return (optax.apply_updates(p, updates), state), None

        (after, _), _ = jax.jit(lambda p, body=body, tx=tx: jax.lax.scan(body, (p, tx.init(p)), None, 50))(params)
        moved = float(jnp.mean(1 - after.astype(jnp.float32)))
        assert after.dtype == dtype
        assert abs(moved - share * 50 * lr) <= tolerances.ROUNDED_WALK * 50 * lr


def test_stochastic_rounding_differs_by_seed_step_and_name_and_repeats_otherwise() -> None:
    p = {"a": jnp.ones(2000, jnp.bfloat16), "b": jnp.ones(2000, jnp.bfloat16)}

    def make_update(seed: int) -> Any:
        return jax.jit(lars(2.0**-12, trust_coefficient=1.0, rounding="stochastic", seed=seed).update)

    update, state = make_update(0), lars(0.1).init(p)
    base, _ = update(p, state, p)
    assert (base["a"] != base["b"]).any()
    assert (base["a"] == update(p, state, p)[0]["a"]).all()
    assert (base["a"] != make_update(1)(p, state, p)[0]["a"]).any()
    assert (base["a"] != update(p, state._replace(count=state.count + 1), p)[0]["a"]).any()


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
from thalweg.optax import adafactor, kron, lamb, lars
assert not jax.config.jax_enable_x64
params = {"w": jnp.cos(jnp.arange(12.0)).reshape(4, 3), "b": np.ones(3), "h": jnp.ones(3, jnp.bfloat16), "s": 1.0}
for solver in (adafactor(0.1, min_dim_size_to_factor=3), lamb(np.float64(0.1)), lars(jnp.array(0.1)),
               kron(0.1), kron(0.1, variant="kron_torch"), lamb(0.1, rounding="stochastic", seed=2**40 + 3)):
    state = solver.init(params)
    update = jax.jit(solver.update)
    for _ in range(3):
        updates, state = update(params, state, params)
    assert update._cache_size() == 1
    assert updates["w"].dtype == jnp.float32 and updates["h"].dtype == jnp.bfloat16
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((updates, state)))
    assert {x.dtype.name for x in jax.tree.leaves(state)} == {"float32", "int32"}
print("served")
"""


@pytest.mark.nightly
def test_everything_works_without_x64_mode() -> None:
    environment = {**os.environ, "JAX_ENABLE_X64": "0", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "served", done.stderr[-3000:]
