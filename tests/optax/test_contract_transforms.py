"""Transformations of jax around init and update: jit, vmap, donation, abstract evaluation. `thalweg check` has more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
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
    "kron": partial(kron, precond_update_probability=0.5),
}
each = pytest.mark.parametrize("name", MADE)
#: Where Kron's programs take seconds to compile.
each_slowly = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "kron" else ()) for name in MADE]
)
STEPS = 4
PARAMS = {
    "w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3),
    "b": jnp.zeros(3, jnp.float32),
    "half": jnp.ones(3, jnp.bfloat16),
}


def gradients(params: Tree, step: Any) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(3 * p.astype(jnp.float32) + step + 1).astype(p.dtype), params)


def described(tree: Tree) -> Tree:
    """What decides whether a compiled program serves another call."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.aval.weak_type), tree), jax.tree.structure(tree)


@lru_cache
def stepper(name: str) -> tuple[Callable[..., Any], list[int]]:
    """One jitted step for all tests, and how often it was traced."""
    traces: list[int] = []
    tx = MADE[name](0.1)

    def step(params: Tree, state: Any, number: Any) -> tuple[Tree, Any]:
        traces.append(1)
        updates, state = tx.update(gradients(params, number), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step), traces


@lru_cache
def looped(name: str) -> tuple[Tree, Any]:
    step, _ = stepper(name)
    params, state = PARAMS, MADE[name](0.1).init(PARAMS)
    for number in range(STEPS):
        params, state = step(params, state, jnp.int32(number))
    return params, state


def assert_alike(found: Tree, expected: Tree) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide_a, wide_b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = tolerances.SPACE["float32"] if a.dtype != jnp.bfloat16 else float(jnp.finfo(a.dtype).eps)
        assert np.abs(wide_a - wide_b).max() <= bound * max(1.0, np.abs(wide_b).max())


@once(1)
@each
def test_a_state_made_under_jit_is_the_same_and_needs_no_other_program(name: str) -> None:
    init = MADE[name](0.1).init
    compiled = jax.jit(init)(PARAMS)
    assert described(compiled) == described(init(PARAMS))
    for a, b in zip(jax.tree.leaves(compiled), jax.tree.leaves(init(PARAMS)), strict=True):
        assert (a == b).all()
    looped(name)
    step, traces = stepper(name)
    step(PARAMS, compiled, jnp.int32(0))
    assert (len(traces), step._cache_size()) == (1, 1)


@once(3)
@each_slowly
def test_schedules_take_one_compilation(name: str) -> None:
    traces: list[int] = []
    tx = MADE[name](optax.linear_schedule(0.1, 0.0, 10))

    @jax.jit
    def step(params: Tree, state: Any) -> tuple[Tree, Any]:
        traces.append(1)
        updates, state = tx.update(gradients(params, 1), state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    assert (len(traces), step._cache_size()) == (1, 1)
    assert described(state) == described(tx.init(PARAMS))


@once(4)
@each
def test_an_abstract_state_has_the_shapes_and_dtypes_of_the_real_one(name: str) -> None:
    for options in ({}, dict(on_nonfinite="skip"), dict(state_dtype="bfloat16")):
        tx = MADE[name](0.1, **options)
        real, abstract = tx.init(PARAMS), jax.eval_shape(tx.init, PARAMS)
        structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
        assert jax.tree.structure(real) == jax.tree.structure(abstract)
        for found in (abstract, jax.eval_shape(tx.init, structs)):
            for a, b in zip(jax.tree.leaves(real), jax.tree.leaves(found), strict=True):
                assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


@once(7)
@each_slowly
def test_a_learning_rate_for_each_member_of_an_ensemble(name: str) -> None:
    params = {"w": PARAMS["w"]}

    def one(lr: Any) -> Tree:
        tx = MADE[name](lr)
        return tx.update(gradients(params, 1), tx.init(params), params)[0]

    together = jax.jit(jax.vmap(one))(jnp.array([0.1, 0.2], jnp.float32))["w"]
    assert_alike(together[1], 2 * together[0])
    assert_alike(together[0], jax.jit(one)(0.1)["w"])


@once(8)
@each
def test_donated_buffers_are_all_used_and_change_no_number(name: str) -> None:
    tx = MADE[name](0.1)

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Any, number: Any) -> tuple[Tree, Any]:
        updates, state = tx.update(gradients(params, number), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = tx.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(STEPS):
            given = jax.tree.leaves((params, state))
            params, state = step(params, state, jnp.int32(number))
            assert all(x.is_deleted() for x in given)
    assert_alike(params, looped(name)[0])


@once(9)
@each
def test_the_first_state_shares_no_memory_with_parameters_or_within_itself(name: str) -> None:
    state = jax.tree.leaves(MADE[name](0.1).init(PARAMS))
    places = [x.unsafe_buffer_pointer() for x in (*jax.tree.leaves(PARAMS), *state) if x.size]
    assert len(set(places)) == len(places)


@once(10)
@each
def test_programs_call_nothing_on_the_host(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip", max_grad_norm=1.0)
    program = str(jax.make_jaxpr(tx.update)(PARAMS, tx.init(PARAMS), PARAMS))
    assert "callback" not in program
    assert "sqrt" in program


@once(12)
@each
def test_ordinary_input_makes_no_nan_anywhere_inside_and_leaks_no_tracer(name: str) -> None:
    tx = MADE[name](0.1, on_nonfinite="skip")
    params = {"w": PARAMS["w"], "b": PARAMS["b"]}
    zeros = jax.tree.map(jnp.zeros_like, params)
    with jax.debug_nans(True), jax.checking_leaks():
        update = jax.jit(tx.update)
        state = jax.jit(tx.init)(params)
        for grads in (zeros, gradients(params, 1), zeros):
            updates, state = update(grads, state, params)
    assert (state.count, state.skipped) == (3, 0)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((updates, state)))


@by_turns("options", first=13)
@each
@pytest.mark.parametrize("options", [{}, dict(on_nonfinite="skip", max_grad_norm=1.0)], ids=["plain", "guarded"])
def test_strict_promotion_of_dtypes_and_ranks_is_kept(name: str, options: dict[str, Any]) -> None:
    tx = MADE[name](0.1, **options)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        updates, _ = jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS), PARAMS)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, PARAMS)


def test_a_transformation_can_be_a_static_argument() -> None:
    tx, traces = lamb(0.1), []

    def step(tx: Any, state: Any) -> Any:
        traces.append(1)
        return tx.update(PARAMS, state, PARAMS)[1]

    compiled = jax.jit(step, static_argnums=0)
    assert compiled(tx, compiled(tx, tx.init(PARAMS))).count == 2
    assert len(traces) == 1


def test_an_abstract_tree_has_a_state_as_in_optax() -> None:
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS)
    assert described(lamb(0.1).init(structs)) == described(lamb(0.1).init(PARAMS))


@once(14)
@each
def test_parameters_committed_to_a_device_take_one_compilation(name: str) -> None:
    tx = MADE[name](0.1)
    params = jax.device_put({"w": PARAMS["w"], "b": PARAMS["b"]}, jax.devices()[0])
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
    assert update._cache_size() == 1
