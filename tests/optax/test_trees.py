"""Any tree of parameters is served, whatever the containers, and options may be given leaf by leaf."""

from __future__ import annotations

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax_runs import GRADS, MADE, PARAMS, Tree, every_function, run, same_bits

from thalweg import OptionError, UnusedOverrideWarning
from thalweg.optax import adafactor, explain, kron, lamb, lars

pytestmark = pytest.mark.slow  # many operations are compiled


class Pair(NamedTuple):
    w: Any
    b: Any


class Box(NamedTuple):
    value: Tree


class Attention(NamedTuple):
    query: Any
    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    w: Any
    b: Any
    width: int = dataclasses.field(default=3, metadata=dict(static=True))


def filled(shapes: Tree) -> Tree:
    """Numbers in place of shapes: what libraries draw would be compiled operation by operation."""
    return jax.tree.map(lambda s: jnp.asarray(np.cos(np.arange(s.size).reshape(s.shape) + 0.5), s.dtype), shapes)


def make_linen() -> Tree:
    linen = pytest.importorskip("flax.linen")
    return filled(jax.eval_shape(linen.Dense(3).init, jax.random.key(0), jnp.ones((1, 4)))["params"])


def make_nnx() -> Tree:
    nnx = pytest.importorskip("flax.nnx")
    return filled(nnx.state(nnx.eval_shape(lambda: nnx.Linear(4, 3, rngs=nnx.Rngs(0))), nnx.Param))


def make_equinox() -> Tree:
    eqx = pytest.importorskip("equinox")
    layers = eqx.filter_eval_shape(lambda: eqx.nn.MLP(4, 3, width_size=5, depth=1, key=jax.random.key(0)))
    return filled(eqx.filter(layers, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)))


W = jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3)
B = jnp.cos(jnp.arange(3, dtype=jnp.float32) + 0.5)
#: Trees, and the names of their leaves: paths that end as attributes are called. Boxes of one array are looked through.
CONTAINERS: dict[str, tuple[Callable[[], Tree], list[str]]] = {
    "nested dict": (lambda: {"layers": {"0": {"w": W}, "1": {"b": B}}}, ["layers.0.w", "layers.1.b"]),
    "boxes": (lambda: {"boxed": Box(W), "pair": Pair(B, Box(B))}, ["boxed", "pair.w", "pair.b"]),
    "a field called value": (lambda: Attention(W, B), ["query", "value"]),
    "one array": (lambda: W, ["params"]),
    "ordered dict": (lambda: OrderedDict(w=W, b=B), ["w", "b"]),
    "mixed": (lambda: {"a": [Pair({"x": W}, ()), [None]], "b": Layer(None, (B,))}, ["a.0.w.x", "b.b.0"]),
    "masked nodes": (lambda: {"b": [None, B], "out": optax.MaskedNode(), "w": W}, ["b.1", "w"]),
    "only None": (lambda: {"a": None}, []),
    "flax.linen": (make_linen, ["bias", "kernel"]),
    "flax.nnx": (make_nnx, ["bias", "kernel"]),
    "equinox": (make_equinox, ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]),
}


def train(tx: optax.GradientTransformation, params: Tree) -> tuple[Tree, Any]:
    def gradients(step: int) -> Tree:
        return jax.tree.map(lambda p: jnp.asarray(np.sin(3.0 * np.arange(p.size) + step).reshape(p.shape)), params)

    return run(tx, params, gradients)


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


@pytest.mark.parametrize("options", [{}, dict(on_nonfinite="skip"), dict(max_grad_norm=1.0)], ids=str)
def test_a_tree_without_arrays_is_stepped(options: dict[str, Any]) -> None:
    tx = lamb(0.1, **options)
    updates, state = tx.update({}, tx.init({}), {})
    assert (updates, state.count) == ({}, 1)


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
    params, tx = {"w": np.asarray(W).copy(), "number": 2.0}, lars(0.1, trust_coefficient=0.1)
    grads = jax.tree.map(lambda p: np.sin(3 * p), params)
    kept = jax.tree.map(np.copy, (params, grads))
    with jax.disable_jit():
        state = tx.init(params)
        found = tx.update(grads, state, params)
        expected = tx.update(jax.tree.map(jnp.asarray, grads), state, jax.tree.map(jnp.asarray, params))
    assert same_bits((params, grads), kept)
    assert same_bits(found, expected)
    assert all(isinstance(x, jax.Array) and not x.weak_type for x in jax.tree.leaves((state, found)))


# ---- options by leaf: stacked layers, masks, overrides by name

STACKED = {"x": jnp.ones((2, 4, 4)), "head": jnp.ones((3, 3))}


@pytest.mark.parametrize(
    "options",
    [
        dict(stacked_axes={"x": True, "head": np.bool_(False)}),
        dict(stacked_axes=lambda params: jax.tree.map(lambda p: np.int64(p.ndim - 2), params)),
        dict(overrides=[("x", dict(stacked_axes=1))]),
    ],
    ids=["tree", "function", "overrides"],
)
def test_stacked_layers_have_factors_of_their_own_however_they_are_named(options: dict[str, Any]) -> None:
    """tests/optax/test_agreements.py has a number for all leaves, and what steps are then."""
    state = jax.eval_shape(kron(0.1, **options).init, STACKED)
    assert [q.shape for q in state.Q["x"]] == [(2, 4, 4), (2, 4, 4)]
    assert [q.shape for q in state.Q["head"]] == [(3, 3), (3, 3)]


MASKS = [
    (lamb, "mask", dict(weight_decay=0.5)),
    (lamb, "trust_ratio_mask", {}),
    (lars, "weight_decay_mask", dict(weight_decay=0.5)),
    (lars, "trust_ratio_mask", {}),
    (adafactor, "weight_decay_mask", dict(weight_decay_rate=0.5)),
    (kron, "weight_decay_mask", dict(weight_decay=0.5)),
]
every_mask = pytest.mark.parametrize(
    ("factory", "mask", "options"), MASKS, ids=[f"{m[0].__name__}-{m[1]}" for m in MASKS]
)
LAYERS = {"layers": [PARAMS, PARAMS]}
NO_BIAS = {"layers": [{"w": np.bool_(True), "b": np.array(False)}, {"w": jnp.array(True), "b": False}]}


@every_mask
def test_masks_are_trees_prefixes_or_functions(factory: Any, mask: str, options: dict[str, Any]) -> None:
    def of(value: Any) -> list[str]:
        """The parameters that have decay, or a ratio: tests/optax/test_equals_optax.py has their steps."""
        rows = explain(factory(0.1, **options, **{mask: value}), LAYERS).rows
        is_in = {
            row.name: row.treatment == "trust ratio" if "ratio" in mask else row.weight_decay != "0" for row in rows
        }
        return [name for name, own in is_in.items() if own]

    assert of(True) == ["layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w"]
    assert of(False) == []
    assert of({"layers": [True, False]}) == ["layers.0.b", "layers.0.w"]
    for value in (NO_BIAS, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)):
        assert of(value) == ["layers.0.w", "layers.1.w"]


@every_mask
def test_masks_and_stacks_that_do_not_fit_are_refused(factory: Any, mask: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"stacked_axes=2, but parameter 'b' has shape \(3,\)"):
        factory(0.1, stacked_axes=2).init(PARAMS)
    with pytest.raises(OptionError, match="stacked_axes"):
        factory(0.1, stacked_axes={"w": -1, "b": 0}).init(PARAMS)
    for wrong in ({"w": True}, {"w": True, "b": True, "c": True}, [True, False], {"w": {"x": True}, "b": True}):
        for given in (wrong, lambda _, wrong=wrong: wrong):
            with pytest.raises(OptionError, match=mask):
                factory(0.1, **options, **{mask: given}).init(PARAMS)
    for wrong in ({"w": "yes", "b": True}, {"w": 2, "b": True}, {"w": 0.5, "b": True}):
        with pytest.raises(OptionError, match=rf"{mask} must be True or False for parameter 'w'"):
            factory(0.1, **options, **{mask: wrong}).init(PARAMS)


def test_two_masks_concern_each_its_own_options_and_overrides_by_name_win() -> None:
    masks = dict(weight_decay_mask={"w": False, "b": True}, trust_ratio_mask={"w": True, "b": False})
    for overrides, decays in (([], ["0", "0.5"]), ([("w", dict(weight_decay=0.1))], ["0.1", "0.5"])):
        rows = explain(lars(0.1, weight_decay=0.5, **masks, overrides=overrides), PARAMS).rows
        assert {row.name: row.weight_decay for row in rows} == dict(zip("wb", decays, strict=True))
        assert {row.name: row.treatment for row in rows} == {"w": "trust ratio", "b": "no trust ratio"}


def test_overrides_that_match_nothing_are_told_once_at_init() -> None:
    tx = lars(0.1, overrides=[("*.bais", dict(lr_scale=0.0)), ("w", dict(lr_scale=0.5))])
    with pytest.warns(UnusedOverrideWarning, match=re.escape("match no parameter: '*.bais'")) as caught:
        state = tx.init(PARAMS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    jax.eval_shape(tx.update, GRADS, state, PARAMS)
    with pytest.warns(UnusedOverrideWarning):
        jax.eval_shape(tx.init, PARAMS)
