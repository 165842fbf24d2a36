"""Any tree of parameters is served, and what a leaf gets does not depend on the containers around it."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lanes import by_turns, once
from optax_runs import MADE, Tree, each

pytestmark = pytest.mark.slow  # many small programs are compiled


class Pair(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    width: int = dataclasses.field(default=3, metadata=dict(static=True))


def array(*shape: int, start: float = 0.3) -> jax.Array:
    return jnp.cos(start + jnp.arange(int(np.prod(shape)), dtype=jnp.float32)).reshape(shape)


def leaves() -> Iterator[jax.Array]:
    for start in range(100):
        yield array(4, 3, start=start)
        yield array(3, start=start + 0.5)


def containers() -> dict[str, Tree]:
    x = leaves()

    def new() -> jax.Array:
        return next(x)

    return {
        "dict": {"w": new(), "b": new()},
        "nested dict": {"layers": {"0": {"w": new()}, "1": {"b": new()}}},
        "list": [new(), new()],
        "tuple": (new(), new()),
        "tuple of one": (new(),),
        "NamedTuple": Pair(new(), new()),
        "dataclass": Layer(new(), new()),
        "ordered dict": OrderedDict(w=new(), b=new()),
        "mixed": {"a": [Pair({"x": new()}, ()), [None]], "b": Layer(None, (new(),))},
        "None leaves": {"w": new(), "missing": None, "b": [None, new()]},
        "masked nodes": {"w": new(), "out": optax.MaskedNode(), "b": new()},
        "bare array": new(),
        "empty": {},
        "empty tuple": (),
        "only None": {"a": None},
    }


def gradients(tree: Tree, step: int) -> Tree:
    return jax.tree.map(lambda p: jnp.sin(3.0 * p + step).astype(p.dtype), tree)


def trained(tx: optax.GradientTransformation, params: Tree, steps: int = 2) -> tuple[Tree, Any]:
    with jax.disable_jit():
        state = tx.init(params)
        for step in range(steps):
            updates, state = tx.update(gradients(params, step), state, params)
            assert jax.tree.structure(updates) == jax.tree.structure(params)
            params = optax.apply_updates(params, updates)
    return params, state


@by_turns()
@each
@pytest.mark.parametrize("container", containers())
def test_leaves_step_the_same_in_every_container(name: str, container: str) -> None:
    tree = containers()[container]
    params, state = trained(MADE[name](0.1), tree)
    flat, _ = trained(MADE[name](0.1), jax.tree.leaves(tree))
    assert jax.tree.structure(params) == jax.tree.structure(tree)
    for own, alone, before in zip(jax.tree.leaves(params), flat, jax.tree.leaves(tree), strict=True):
        assert (own == alone).all()
        assert (own != before).any()
    assert state.count == 2


@pytest.mark.nightly
@by_turns("shape", first=3)
@each
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)])
def test_arrays_without_elements_do_not_make_a_step_count_as_not_finite(name: str, shape: tuple[int, ...]) -> None:
    params, state = trained(MADE[name](0.1, on_nonfinite="skip"), {"empty": jnp.zeros(shape), "w": array(4, 3)})
    assert (state.count, state.skipped) == (2, 0)
    assert (params["w"] != array(4, 3)).any()


@once(4)
@each
def test_numpy_arrays_step_as_arrays_of_jax_and_are_left_as_they_were(name: str) -> None:
    before = {"w": np.asarray(array(4, 3)), "b": np.asarray(array(3))}
    params = {key: value.copy() for key, value in before.items()}
    grads = {key: np.sin(3 * value) for key, value in params.items()}
    given = {key: value.copy() for key, value in grads.items()}
    tx = MADE[name](0.1)
    with jax.disable_jit():
        state = tx.init(params)
        updates, _ = tx.update(grads, state, params)
        expected, _ = tx.update(jax.tree.map(jnp.asarray, grads), state, jax.tree.map(jnp.asarray, params))
    for key in before:
        assert (params[key] == before[key]).all()
        assert (grads[key] == given[key]).all()
        assert (updates[key] == expected[key]).all()
        assert isinstance(updates[key], jax.Array)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


@once(5)
@each
def test_python_numbers_step_as_arrays_of_jax(name: str) -> None:
    tx = MADE[name](0.1)
    with jax.disable_jit():
        updates, state = tx.update({"a": 0.5}, tx.init({"a": 2.0}), {"a": 2.0})
        array_of = {"a": jnp.asarray(2.0, jnp.result_type(float))}
        expected, of_array = tx.update({"a": jnp.asarray(0.5)}, tx.init(array_of), array_of)
    assert updates["a"] == expected["a"] != 0
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), of_array)
    assert not any(x.weak_type for x in jax.tree.leaves((updates, state)))


@once(6)
@each
def test_an_empty_tree_has_a_state_and_counts(name: str) -> None:
    for options in ({}, dict(on_nonfinite="skip"), dict(max_grad_norm=1.0)):
        tx = MADE[name](0.1, **options)
        updates, state = tx.update({}, tx.init({}), {})
        assert updates == {}
        assert state.count == 1


def test_fields_called_value_keep_their_names_and_boxes_of_one_array_are_looked_through() -> None:
    from typing import NamedTuple

    from thalweg.optax.trees import named

    class Attention(NamedTuple):
        query: Tree
        value: Tree

    class Box(NamedTuple):
        value: Tree

    tree = {"attention": Attention(jnp.ones(2), jnp.ones(2)), "boxed": Box(jnp.ones(2))}
    assert named(tree).names == ["attention.query", "attention.value", "boxed"]
