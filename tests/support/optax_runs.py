"""Runs of gradient transformations over small trees, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thalweg.optax import adafactor, kron, lamb, lars

Tree: TypeAlias = Any
#: Six sevenths of the time would go into machine code that is run once.
SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
#: With options that compile soon.
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3, momentum=0.9),
    "lamb": partial(lamb, weight_decay=0.1),
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": partial(kron, damping_mode="expected", max_size_dense=0),
}
every_function = pytest.mark.parametrize("name", MADE)
PARAMS = {"w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3), "b": jnp.array([1.0, 2.0, -0.5], jnp.float32)}
GRADS = jax.tree.map(lambda p: jnp.sin(3 * p + 1), PARAMS)


def compiled(function: Callable[..., Any], level: int = 0, **options: Any) -> Any:
    """Compiled soon. level: of optimization, of which 1 takes minutes for codes of eight bits."""
    return jax.jit(function, compiler_options={**SOON, "xla_backend_optimization_level": level}, **options)


def take_step(tx: Any, params: Tree = PARAMS, grads: Tree = GRADS) -> tuple[Tree, Any]:
    """Updates and state of a first step."""
    return compiled(tx.update)(grads, compiled(tx.init)(params), params)


def run(tx: Any, params: Tree = PARAMS, grads: Tree = GRADS, steps: int = 2) -> tuple[Tree, Any]:
    """Parameters and state after some steps, compiled once. grads: a tree, or a function of the step, from 1."""

    @compiled
    def take(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        return optax.apply_updates(params, updates), state

    state = compiled(tx.init)(params)
    for step in range(1, steps + 1):
        params, state = take(grads(step) if callable(grads) else grads, state, params)
    assert take._cache_size() == 1
    return params, state


def same_bits(a: Tree, b: Tree) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def assert_alike(found: Tree, expected: Tree, tolerance: float) -> None:
    """Errors relative to the size of each array."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max(initial=0) <= tolerance * np.abs(b).max(initial=0)


# ---- runs of many steps


def problem(shapes: Any, *, steps: int, dtype: Any = np.float64) -> tuple[Any, Any]:
    """First parameters, and gradients with a leading axis of steps: of varied scale, with rows that differ."""
    rng = np.random.default_rng(0)

    def noise(shape: tuple[int, ...]) -> Any:
        rows = np.exp(rng.standard_normal((*shape[:1], *(1,) * (len(shape) - 1))))
        stages = 1 + np.arange(steps).reshape((steps,) + (1,) * len(shape)) % 3
        return (rng.standard_normal((steps, *shape)) * rows * stages).astype(dtype)

    own = dict(is_leaf=lambda x: isinstance(x, tuple))
    params = jax.tree.map(lambda shape: np.asarray(rng.standard_normal(shape)).astype(dtype), shapes, **own)
    return params, jax.tree.map(noise, shapes, **own)


def train(solver: Any, params: Any, grads: Any, *, start: Callable[[Any], Any] = lambda s: s) -> Any:
    """Parameters and state after all gradients, by one program; ``start`` changes the first state."""

    def step(carry: Any, noise: Any) -> Any:
        p, state = carry
        updates, state = solver.update(jax.tree.map(lambda n, p: n + 0.3 * p, noise, p), state, p)
        return (optax.apply_updates(p, updates), state), None

    def run_all(params: Any, grads: Any) -> Any:
        return jax.lax.scan(step, (params, start(solver.init(params))), grads)[0]

    return compiled(run_all)(params, grads)


def error(found: Any, wanted: Any, start: Any) -> float:
    """The largest difference over the largest displacement."""
    triples = [[np.asarray(x) for x in own] for own in zip(*map(jax.tree.leaves, (found, wanted, start)), strict=True)]
    assert all(a.dtype == b.dtype for a, b, _ in triples)
    displacement = max(np.abs(b - p).max() for _, b, p in triples)
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    return float(max(np.abs(a - b).max() for a, b, _ in triples) / displacement)
