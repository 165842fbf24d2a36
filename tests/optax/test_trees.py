"""Any tree of parameters is served, and what a leaf gets does not depend on the containers around it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import MADE, Tree, every_function, same_bits

from thalweg import UnusedOverrideWarning
from thalweg.optax import explain, lamb, lars


class Pair(NamedTuple):
    w: Any
    b: Any


class Box(NamedTuple):
    value: Tree


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    width: int = dataclasses.field(default=3, metadata=dict(static=True))


def make_linen() -> Tree:
    linen = pytest.importorskip("flax.linen")
    return linen.Dense(3, bias_init=linen.initializers.ones).init(jax.random.key(0), jnp.ones((1, 4)))["params"]


def make_nnx() -> Tree:
    nnx = pytest.importorskip("flax.nnx")
    return nnx.state(nnx.Linear(4, 3, bias_init=nnx.initializers.ones, rngs=nnx.Rngs(0)), nnx.Param)


def make_equinox() -> Tree:
    eqx = pytest.importorskip("equinox")
    return eqx.filter(eqx.nn.MLP(4, 3, width_size=5, depth=1, key=jax.random.key(0)), eqx.is_inexact_array)


W = jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3)
B = jnp.cos(jnp.arange(3, dtype=jnp.float32) + 0.5)
#: Trees, and the names of their leaves: paths that end as attributes are called. Boxes of one array are looked through.
CONTAINERS: dict[str, tuple[Callable[[], Tree], list[str]]] = {
    "nested dict": (lambda: {"layers": {"0": {"w": W}, "1": {"b": B}}}, ["layers.0.w", "layers.1.b"]),
    "list": (lambda: [W, B], ["0", "1"]),
    "NamedTuple": (lambda: Pair(W, B), ["w", "b"]),
    "boxes": (lambda: {"boxed": Box(W), "pair": Pair(B, Box(B))}, ["boxed", "pair.w", "pair.b"]),
    "dataclass": (lambda: Layer(W, B), ["w", "b"]),
    "ordered dict": (lambda: OrderedDict(w=W, b=B), ["w", "b"]),
    "mixed": (lambda: {"a": [Pair({"x": W}, ()), [None]], "b": Layer(None, (B,))}, ["a.0.w.x", "b.b.0"]),
    "masked nodes": (lambda: {"b": [None, B], "out": optax.MaskedNode(), "w": W}, ["b.1", "w"]),
    "only None": (lambda: {"a": None}, []),
    "flax.linen": (make_linen, ["bias", "kernel"]),
    "flax.nnx": (make_nnx, ["bias", "kernel"]),
    "equinox": (make_equinox, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]),
}


def train(tx: optax.GradientTransformation, params: Tree) -> tuple[Tree, Any]:
    with jax.disable_jit():  # what is compiled operation by operation serves all trees
        state = tx.init(params)
        for step in range(2):
            grads = jax.tree.map(lambda p, step=step: jnp.sin(3.0 * p + step).astype(p.dtype), params)
            updates, state = tx.update(grads, state, params)
            assert jax.tree.structure(updates) == jax.tree.structure(params)
            params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("container", CONTAINERS)
def test_leaves_have_the_same_steps_and_their_own_names_in_every_container(container: str) -> None:
    make, names = CONTAINERS[container]
    tree, solver = make(), lars(0.1, trust_coefficient=0.1)
    params, state = train(solver, tree)
    flat, _ = train(solver, jax.tree.leaves(tree))
    assert jax.tree.structure(params) == jax.tree.structure(tree)
    assert same_bits(jax.tree.leaves(params), flat)
    assert all((a != b).any() for a, b in zip(flat, jax.tree.leaves(tree), strict=True))
    assert state.count == 2
    seen: list[str] = []
    with pytest.warns(UnusedOverrideWarning) if names else nullcontext():
        lamb(0.1, overrides=[(lambda name, p: bool(seen.append(name)), dict(weight_decay=0.1))]).init(tree)
    assert seen == names


def test_fields_called_value_keep_their_names() -> None:
    class Attention(NamedTuple):
        query: Tree
        value: Tree

    told = explain(lamb(0.1), {"attention": Attention(jnp.ones(2), jnp.ones(2)), "boxed": Box(jnp.ones(2))})
    assert [row.name for row in told.rows] == ["attention.query", "attention.value", "boxed"]


def test_a_bare_array_and_an_empty_tree_are_trees() -> None:
    params, state = train(lars(0.1, trust_coefficient=0.1), W)
    assert (params != W).any()
    assert state.count == 2
    for options in ({}, dict(on_nonfinite="skip"), dict(max_grad_norm=1.0)):
        tx = lamb(0.1, **options)
        updates, state = tx.update({}, tx.init({}), {})
        assert updates == {}
        assert state.count == 1


@every_function
def test_flax_writes_and_reads_the_state(name: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    tx, params = MADE[name](0.1), {"w": W, "b": B}
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: jnp.arange(1, 1 + x.size).reshape(x.shape).astype(x.dtype), state)
    again = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    assert same_bits(again, state)
    assert [x.dtype for x in jax.tree.leaves(again)] == [x.dtype for x in jax.tree.leaves(state)]


def test_arrays_without_elements_do_not_make_a_step_count_as_not_finite() -> None:
    tree = {"empty": jnp.zeros((2, 0, 3), jnp.float32), "w": W}
    params, state = train(lars(0.1, trust_coefficient=0.1, on_nonfinite="skip"), tree)
    assert (state.count, state.skipped) == (2, 0)
    assert (params["w"] != W).any()


def test_numpy_arrays_and_python_numbers_step_as_arrays_of_jax_and_are_left_as_they_were() -> None:
    params = {"w": np.asarray(W).copy(), "number": 2.0}
    grads = {"w": np.sin(3 * params["w"]), "number": 0.5}
    given = {"params": params["w"].copy(), "grads": grads["w"].copy()}
    tx = lars(0.1, trust_coefficient=0.1)
    with jax.disable_jit():
        state = tx.init(params)
        found = tx.update(grads, state, params)
        expected = tx.update(jax.tree.map(jnp.asarray, grads), state, jax.tree.map(jnp.asarray, params))
    assert same_bits((params["w"], grads["w"]), (given["params"], given["grads"]))
    assert same_bits(found, expected)
    assert (found[0]["w"] != 0).any()
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in jax.tree.leaves((state, found)))
