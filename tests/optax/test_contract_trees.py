"""Any tree of parameters is served, and what a leaf gets does not depend on the containers around it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import by_turns, once
from optax_runs import MADE, Tree, each

from thalweg import UnusedOverrideWarning
from thalweg.optax import lamb
from thalweg.optax.trees import named

pytestmark = pytest.mark.slow  # many small programs are compiled
night = partial(pytest.param, marks=pytest.mark.nightly)


class Pair(NamedTuple):
    w: Any
    b: Any


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


def arrays() -> tuple[jax.Array, jax.Array]:
    start = jnp.arange(12, dtype=jnp.float32)
    return jnp.cos(start).reshape(4, 3), jnp.cos(start[:3] + 0.5)


W, B = arrays()
#: Trees, and what those of other libraries call their leaves.
CONTAINERS: dict[str, Callable[[], Tree]] = {
    "nested dict": lambda: {"layers": {"0": {"w": W}, "1": {"b": B}}},
    "list": lambda: [W, B],
    "tuple of one": lambda: (W,),
    "NamedTuple": lambda: Pair(W, B),
    "dataclass": lambda: Layer(W, B),
    "ordered dict": lambda: OrderedDict(w=W, b=B),
    "mixed": lambda: {"a": [Pair({"x": W}, ()), [None]], "b": Layer(None, (B,))},
    "None leaves": lambda: {"w": W, "missing": None, "b": [None, B]},
    "masked nodes": lambda: {"w": W, "out": optax.MaskedNode(), "b": B},
    "bare array": lambda: W,
    "empty": lambda: {},
    "only None": lambda: {"a": None},
    "flax.linen": make_linen,
    "flax.nnx": make_nnx,
    "equinox": make_equinox,
}
NAMES = {
    "flax.linen": ["bias", "kernel"],
    "flax.nnx": ["bias", "kernel"],
    "equinox": ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
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


@by_turns("container")
@pytest.mark.parametrize("name", ["lars", "adafactor", night("lamb"), night("kron")])
@pytest.mark.parametrize("container", [night(own) if own in NAMES else own for own in CONTAINERS])
def test_leaves_step_the_same_in_every_container(name: str, container: str) -> None:
    tree = CONTAINERS[container]()
    params, state = train(MADE[name](0.1), tree)
    flat, _ = train(MADE[name](0.1), jax.tree.leaves(tree))
    assert jax.tree.structure(params) == jax.tree.structure(tree)
    for own, alone, before in zip(jax.tree.leaves(params), flat, jax.tree.leaves(tree), strict=True):
        assert (own == alone).all()
        assert (own != before).any()
    assert state.count == 2


@pytest.mark.parametrize("container", NAMES)
def test_names_of_leaves_are_paths_that_end_as_attributes_are_called(container: str) -> None:
    seen: list[str] = []
    solver = lamb(0.1, overrides=[(lambda name, p: bool(seen.append(name)), dict(weight_decay=0.1))])
    with pytest.warns(UnusedOverrideWarning):
        solver.init(CONTAINERS[container]())
    assert seen == NAMES[container]


def test_fields_called_value_keep_their_names_and_boxes_of_one_array_are_looked_through() -> None:
    class Attention(NamedTuple):
        query: Tree
        value: Tree

    class Box(NamedTuple):
        value: Tree

    tree = {"attention": Attention(jnp.ones(2), jnp.ones(2)), "boxed": Box(jnp.ones(2))}
    assert named(tree).names == ["attention.query", "attention.value", "boxed"]


@once(1)
@each
def test_flax_writes_and_reads_the_state(name: str) -> None:
    serialization = pytest.importorskip("flax.serialization")
    tx, params = MADE[name](0.1), {"w": W, "b": B}
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: jnp.arange(1, 1 + x.size).reshape(x.shape).astype(x.dtype), state)
    again = serialization.from_bytes(tx.init(params), serialization.to_bytes(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype
        assert (a == b).all()


@pytest.mark.nightly
@each
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_arrays_without_elements_do_not_make_a_step_count_as_not_finite(name: str, shape: tuple[int, ...]) -> None:
    params, state = train(MADE[name](0.1, on_nonfinite="skip"), {"empty": jnp.zeros(shape), "w": W})
    assert (state.count, state.skipped) == (2, 0)
    assert (params["w"] != W).any()


@once(0)
@pytest.mark.parametrize("name", ["lars", "adafactor", "lamb", "kron"])
def test_numpy_arrays_and_python_numbers_step_as_arrays_of_jax_and_are_left_as_they_were(name: str) -> None:
    params = {"w": np.asarray(W).copy(), "number": 2.0}
    grads = {"w": np.sin(3 * params["w"]), "number": 0.5}
    given = {"params": params["w"].copy(), "grads": grads["w"].copy()}
    tx = MADE[name](0.1)
    with jax.disable_jit():
        state = tx.init(params)
        updates, after = tx.update(grads, state, params)
        expected, wanted = tx.update(jax.tree.map(jnp.asarray, grads), state, jax.tree.map(jnp.asarray, params))
    assert (params["w"] == given["params"]).all()
    assert (grads["w"] == given["grads"]).all()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), wanted)
    for key in params:
        assert isinstance(updates[key], jax.Array)
        assert (updates[key] == expected[key]).all()
        assert (updates[key] != 0).any()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))
    assert not any(x.weak_type for x in jax.tree.leaves((updates, after)))


@pytest.mark.parametrize("options", [{}, dict(on_nonfinite="skip"), dict(max_grad_norm=1.0)], ids=str)
def test_an_empty_tree_has_a_state_and_counts(options: dict[str, Any]) -> None:
    tx = lamb(0.1, **options)
    updates, state = tx.update({}, tx.init({}), {})
    assert updates == {}
    assert state.count == 1
