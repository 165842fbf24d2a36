"""Transformations of jax around init and update: jit, donation, derivatives; dtypes, with x64 mode on and off."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import MADE, Tree, compiled, every_function

from thalweg.optax import adafactor, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

W = np.cos(np.arange(12.0)).reshape(4, 3)
DTYPES = ["bfloat16", "float16", "float32", "float64"]
PARAMS = {"w": jnp.asarray(W, jnp.float32), "b": jnp.zeros(3, jnp.float32), "half": jnp.ones(3, jnp.bfloat16)}


def gradients(params: Tree, step: Any) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + step + 1).astype(p.dtype), params)


@every_function
def test_donated_buffers_are_all_used_by_one_program(name: str) -> None:
    tx = MADE[name](0.1)

    @partial(compiled, donate_argnums=(0, 1))
    def step(params: Tree, state: Any, number: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(gradients(params, number), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.device_put(jax.tree.map(jnp.copy, PARAMS), jax.devices()[0])  # committed, which state is not
    state = tx.init(params)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, state)) if x.size]
    assert len(set(places)) == len(places), "the first state shares memory"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            given = jax.tree.leaves((params, state))
            params, state = step(params, state, jnp.int32(number))
            assert all(x.is_deleted() for x in given)
    assert step._cache_size() == 1


@every_function
def test_programs_call_nothing_on_the_host_and_promote_nothing(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=1.0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        program, (updates, _) = jax.make_jaxpr(tx.update, return_shape=True)(PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, PARAMS)
    assert "callback" not in str(program)
    assert "sqrt" in str(program)


def test_a_transformation_can_be_a_static_argument() -> None:
    tx = lamb(0.1)
    step = jax.jit(lambda tx, state: tx.update(PARAMS, state, PARAMS)[1], static_argnums=0)
    assert step(tx, step(tx, tx.init(PARAMS))).count == 2
    assert step._cache_size() == 1


# ---- derivatives of whole training runs

X = np.sin(np.arange(20.0)).reshape(5, 4)
WIDE = {"w": W, "b": np.zeros(3)}
#: With an option by which there is a derivative too.
SMOOTH: dict[str, tuple[Any, dict[str, float]]] = {
    "adafactor": (partial(adafactor, min_dim_size_to_factor=3), dict(decay_rate=0.7)),
    "lamb": (lamb, dict(b1=0.8, weight_decay=0.1)),
    "lars": (partial(lars, trust_coefficient=0.1), dict(momentum=0.5)),
    "kron": (MADE["kron"], {}),
}


def outcome(name: str, lr: Any, params: Tree, options: Any) -> jax.Array:
    """The loss after some steps of training."""
    tx = SMOOTH[name][0](lr, **options)

    def loss(params: Tree) -> jax.Array:
        return jnp.mean((jnp.tanh(jnp.asarray(X) @ params["w"] + params["b"]) - 0.3) ** 2)

    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
    return loss(params)


def assert_slope(found: Any, f: Any) -> None:
    """Beside central differences."""
    h = 1e-5
    expected = (float(f(h)) - float(f(-h))) / (2 * h)
    assert expected != 0
    assert abs(float(found) - expected) <= tolerances.FINITE_DIFFERENCES * max(1.0, abs(expected))


@pytest.mark.parametrize("name", SMOOTH)
def test_derivatives_by_rate_parameters_and_options_are_those_of_finite_differences(name: str) -> None:
    at, options = partial(outcome, name), SMOOTH[name][1]
    # the machine code of level 0 makes NaN of derivatives by Kron, which are finite without compiling, and at level 1
    f, slope = compiled(at), compiled(jax.grad(at, argnums=(0, 1, 2)), level=1)
    by_lr, by_params, by_options = slope(0.1, WIDE, options)
    assert all(jnp.isfinite(x).all() for x in (by_lr, *by_params.values()))
    assert_slope(by_lr, lambda h: f(0.1 + h, WIDE, options))
    # the bias stays at zero, where norms have no slope
    direction = np.cos(3 * W)
    assert_slope(jnp.sum(by_params["w"] * direction), lambda h: f(0.1, {**WIDE, "w": W + h * direction}, options))
    for key in options:
        assert_slope(by_options[key], lambda h, key=key: f(0.1, WIDE, {**options, key: options[key] + h}))


@pytest.mark.parametrize("name", ["adafactor", "lamb", "lars"])
def test_a_gradient_of_zero_has_finite_derivatives(name: str) -> None:
    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}

    def step(params: Tree, grads: Tree) -> jax.Array:
        tx = SMOOTH[name][0](0.1)
        updates, _ = tx.update(grads, tx.init(params), params)
        return sum(jnp.sum(x) for x in jax.tree.leaves(optax.apply_updates(params, updates)))

    slope = compiled(jax.grad(step, argnums=(0, 1)))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(slope(params, jax.tree.map(jnp.zeros_like, params))))


# ---- dtypes of parameters, gradients, options and state


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


@pytest.mark.parametrize("lr", [jnp.array(0.1), lambda count: jnp.array(0.1)], ids=["number", "schedule"])
def test_options_that_are_arrays_of_float64_leave_float32_as_it_is(lr: Any) -> None:
    options = dict(b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.1, eps_root=0.0, max_grad_norm=1.0)
    arrays: Any = {key: jnp.asarray(value) for key, value in options.items()}
    assert {x.dtype.name for x in arrays.values()} == {"float64"}
    params, tx = params_of("float32"), lamb(lr, **arrays)
    made = jax.eval_shape(tx.update, params, tx.init(params), params)
    assert {x.dtype.name for x in jax.tree.leaves(made)} == {"float32", "int32"}
    assert "f64[4,3]" not in str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, optax
from thalweg.optax import adafactor, kron, lamb, lars
from thalweg.rules.noise import bits
from thalweg.spaces import jax as space, numpy as reference
assert not jax.config.jax_enable_x64
key = dict(seed=3, tensor=4000000000)
draw = lambda t: bits(space, jnp.zeros((5, 3)), **key, t=t)
for drawn in (draw(7), jax.jit(draw)(7)):
    assert (np.asarray(drawn) == bits(reference, np.zeros((5, 3)), **key, t=7)).all()
params = {"w": jnp.cos(jnp.arange(12.0)).reshape(4, 3), "b": np.ones(3), "h": jnp.ones(3, jnp.bfloat16), "s": 1.0}
for solver in (adafactor(0.1, min_dim_size_to_factor=3), lars(jnp.array(0.1)), kron(0.1),
               lamb(np.float64(0.1), rounding="stochastic", seed=2**40 + 3)):
    state = jax.jit(solver.init)(params)
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
