"""Precision: parameters of 16, 32 and 64 bits, with x64 mode on and off."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from lanes import by_turns, once

from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

Tree = Any
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3, momentum=0.9),
    "lamb": partial(lamb, weight_decay=0.1),
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": kron,
}
each = pytest.mark.parametrize("name", MADE)
W = np.cos(np.arange(12.0)).reshape(4, 3)


def params_of(dtype: Any) -> Tree:
    return {"w": jnp.asarray(W, dtype), "b": jnp.ones(3, dtype)}


def abstract_step(tx: Any, params: Tree, grads: Tree) -> tuple[Tree, Any]:
    return jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)


@by_turns("dtype")
@each
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_statistics_of_parameters_of_up_to_32_bits_are_float32(name: str, dtype: Any) -> None:
    tx = MADE[name](0.1)
    state = tx.init(params_of(dtype))
    _, after = abstract_step(tx, params_of(dtype), params_of(dtype))
    for found in (state, after):
        assert {x.dtype for x in jax.tree.leaves(found._replace(count=None))} == {jnp.dtype("float32")}
        assert found.count.dtype == jnp.int32


@once(1)
@each
def test_statistics_of_float64_parameters_are_float64(name: str) -> None:
    # adafactor's dtype_momentum is float32 unless it is given, as in optax
    tx = MADE[name](0.1, **(dict(dtype_momentum=jnp.float64) if name == "adafactor" else {}))
    state = tx.init(params_of(jnp.float64))
    assert {x.dtype for x in jax.tree.leaves(state._replace(count=None))} == {jnp.dtype("float64")}
    assert state.count.dtype == jnp.int32


@by_turns("p_dtype", "g_dtype", first=2)
@each
@pytest.mark.parametrize("p_dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
@pytest.mark.parametrize("g_dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64])
def test_updates_have_the_dtype_to_which_parameters_and_gradients_promote(
    name: str, p_dtype: Any, g_dtype: Any
) -> None:
    updates, _ = abstract_step(MADE[name](0.1), params_of(p_dtype), params_of(g_dtype))
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.promote_types(p_dtype, g_dtype)}
    assert not any(x.weak_type for x in jax.tree.leaves(updates))


@once(3)
@each
def test_leaves_of_several_dtypes_keep_their_own(name: str) -> None:
    params = {str(d): jnp.asarray(W, d) for d in ("bfloat16", "float16", "float32", "float64")}
    updates, _ = abstract_step(MADE[name](0.1), params, params)
    assert {key: x.dtype.name for key, x in updates.items()} == {key: key for key in params}


@once(4)
@each
def test_momentum_and_statistics_are_stored_as_asked(name: str) -> None:
    tx = MADE[name](0.1, state_dtype=jnp.bfloat16)
    state, (_, after) = (
        tx.init(params_of(jnp.float32)),
        abstract_step(tx, params_of(jnp.float32), params_of(jnp.float32)),
    )
    field = {"lamb": "exp_avg_sq", "adafactor": "row_var", "lars": "momentum_buffer", "kron": "Q"}[name]
    for found in (state, after):
        assert {x.dtype for x in jax.tree.leaves(getattr(found, field))} == {jnp.dtype("bfloat16")}


def test_dtypes_of_momentum_go_by_any_of_their_names() -> None:
    params = params_of(jnp.float32)
    for dtype in (jnp.bfloat16, "bfloat16", jnp.dtype("bfloat16")):
        assert lamb(0.1, momentum_dtype=dtype).init(params).exp_avg["w"].dtype == jnp.bfloat16
        assert lars(0.1, momentum_dtype=dtype).init(params).momentum_buffer["w"].dtype == jnp.bfloat16
        assert kron(0.1, momentum_dtype=dtype).init(params).momentum_buffer["w"].dtype == jnp.bfloat16
        assert kron(0.1, mu_dtype=dtype).init(params).momentum_buffer["w"].dtype == jnp.bfloat16
        assert kron(0.1, precond_dtype=dtype).init(params).Q["w"][0].dtype == jnp.bfloat16
        solver = adafactor(0.1, momentum=0.9, dtype_momentum=dtype)
        assert solver.init(params).exp_avg["w"].dtype == jnp.bfloat16
        assert solver.init(params).variance["w"].dtype == jnp.float32


@by_turns("dtype", first=5)
@each
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_of_zero_and_tiny_ones_make_no_nan(name: str, dtype: Any) -> None:
    params, tx = {"w": jnp.asarray(W, dtype)}, MADE[name](0.01)
    state, update = tx.init(params), jax.jit(tx.update)
    for size in (0.0, 0.0, 6e-8, 0.0):
        updates, state = update({"w": jnp.full((4, 3), size, dtype)}, state, params)
        assert jnp.isfinite(updates["w"]).all()
        assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(state))


@once(6)
@each
def test_options_that_are_arrays_of_float64_leave_float32_as_it_is(name: str) -> None:
    wide = {
        "adafactor": dict(eps=1e-30, decay_rate=0.8, clipping_threshold=1.0, weight_decay_rate=0.01, min_scale=1e-3),
        "lamb": dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.1, eps_root=0.0, max_grad_norm=1.0),
        "lars": dict(momentum=0.9, weight_decay=0.1, trust_coefficient=0.1, eps=0.0, zero_ratio=1.0),
        "kron": dict(momentum=0.9, weight_decay=0.1, precond_lr=0.1, eps=1e-8, clip=1.0, damping=1e-9),
    }[name]
    factory = {"adafactor": partial(adafactor, min_dim_size_to_factor=3), "lamb": lamb, "lars": lars, "kron": kron}[
        name
    ]
    params = params_of(jnp.float32)
    arrays = {key: jnp.asarray(value) for key, value in wide.items()}
    assert arrays["weight_decay_rate" if name == "adafactor" else "weight_decay"].dtype == jnp.float64
    found = []
    for options, lr in ((wide, 0.1), (arrays, jnp.array(0.1)), (arrays, lambda count: jnp.array(0.1))):
        tx = factory(lr, **options)
        state = tx.init(params)
        updates, after = jax.jit(tx.update)(params, state, params)
        assert {x.dtype for x in jax.tree.leaves((updates, after))} == {jnp.dtype("float32"), jnp.dtype("int32")}
        program = str(jax.make_jaxpr(tx.update)(params, state, params))
        assert "f64[4,3]" not in program
        found.append(updates["w"])
    size = float(jnp.abs(found[0]).max())
    assert all(float(jnp.abs(x - found[0]).max()) <= tolerances.FLOAT32 * size for x in found[1:])


@by_turns(first=7)
@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_stochastic_rounding_moves_parameters_right_on_average(name: str, dtype: Any) -> None:
    factory = {"adafactor": adafactor, "lamb": lamb, "lars": partial(lars, trust_coefficient=1.0)}[name]
    lr = {jnp.bfloat16: 2.0**-12, jnp.float16: 2.0**-15}[dtype]  # a sixteenth of the distance between neighbours
    params = jnp.ones(2000, dtype)
    for rounding, share in (("nearest", 0.0), ("stochastic", 1.0)):
        tx = factory(lr, rounding=rounding, **({"momentum": 0.0} if name == "lars" else {}))

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

    def first(seed: int, count: int = 0) -> Tree:
        tx = lars(2.0**-12, trust_coefficient=1.0, rounding="stochastic", seed=seed)
        return jax.jit(tx.update)(p, tx.init(p)._replace(count=jnp.int32(count)), p)[0]

    base = first(0)
    assert (base["a"] != base["b"]).any()
    assert (base["a"] == first(0)["a"]).all()
    assert (base["a"] != first(1)["a"]).any()
    assert (base["a"] != first(0, count=1)["a"]).any()


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
