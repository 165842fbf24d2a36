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
import tolerances
from optax_runs import GRADS, MADE, PARAMS, Tree, every_function, same_bits

from thalweg import OptionError, UnusedOverrideWarning
from thalweg.optax import adafactor, kron, lamb, lars

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
    "a field called value": (lambda: Attention(W, B), ["query", "value"]),
    "one array": (lambda: W, ["params"]),
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


# ---- options by leaf: stacked layers, masks, overrides by name

NESTED = {"layers": [{"w": PARAMS["w"], "bias": PARAMS["b"]}, {"w": PARAMS["w"] + 1, "bias": PARAMS["b"] + 1}]}
SLOPES = jax.tree.map(lambda p: jnp.sin(3 * p + 1), NESTED)


def after(tx: Any, params: Tree = PARAMS, grads: Tree = GRADS) -> Tree:
    with jax.disable_jit():  # what is compiled operation by operation serves all tests
        updates, _ = tx.update(grads, tx.init(params), params)
    return optax.apply_updates(params, updates)


def same(a: Tree, b: Tree) -> bool:
    """Whether two are alike, as far as programs compiled apart from each other are."""
    return all(
        float(jnp.abs(x - y).max()) <= tolerances.SPACE["float32"] * float(jnp.abs(y).max())
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def test_stacked_layers_step_as_separate_ones_however_they_are_named() -> None:
    """tests/optax/test_agreements.py has a number for all leaves."""
    layers = [jnp.cos(k + jnp.arange(12, dtype=jnp.float32)).reshape(4, 3) * (k + 1) for k in range(2)]
    apart = {"x": layers, "head": jnp.ones((3, 4), jnp.float32)}
    stacked = {"x": jnp.stack(layers), "head": apart["head"]}
    expected = after(lamb(0.1), apart, apart)
    assert not same(after(lamb(0.1), stacked, stacked)["x"], jnp.stack(expected["x"]))
    for option in (
        dict(stacked_axes={"x": True, "head": np.bool_(False)}),
        dict(stacked_axes=lambda params: jax.tree.map(lambda p: p.ndim - 2, params)),
        dict(overrides=[("x", dict(stacked_axes=1))]),
    ):
        found = after(lamb(0.1, **option), stacked, stacked)
        assert same(found, {"x": jnp.stack(expected["x"]), "head": expected["head"]}), option
    one = {"x": stacked["x"]}
    assert same(after(lamb(0.1, stacked_axes=np.int64(1)), one, one)["x"], jnp.stack(expected["x"]))


MASKS = [
    (lamb, "mask", dict(weight_decay=0.5)),
    (lamb, "trust_ratio_mask", {}),
    (lars, "weight_decay_mask", dict(weight_decay=0.5)),
    (lars, "trust_ratio_mask", {}),
    (adafactor, "weight_decay_mask", dict(weight_decay_rate=0.5)),
    (kron, "weight_decay_mask", dict(weight_decay=0.5)),
]


@pytest.mark.parametrize(("factory", "mask", "options"), MASKS[:5])
def test_masks_are_trees_prefixes_or_functions(factory: Any, mask: str, options: dict[str, Any]) -> None:
    with_all = after(factory(0.1, **options), NESTED, SLOPES)["layers"]
    without = after(factory(0.1, **options, **{mask: False}), NESTED, SLOPES)["layers"]
    assert not same(with_all, without)
    found = after(factory(0.1, **options, **{mask: {"layers": [True, False]}}), NESTED, SLOPES)["layers"]
    assert same(found, [with_all[0], without[1]])
    expected = [{"w": a["w"], "bias": b["bias"]} for a, b in zip(with_all, without, strict=True)]
    no_bias = {"layers": [{"w": np.bool_(True), "bias": np.array(False)}, {"w": jnp.array(True), "bias": False}]}
    for value in (no_bias, lambda params: jax.tree.map(lambda p: p.ndim > 1, params)):
        assert same(after(factory(0.1, **options, **{mask: value}), NESTED, SLOPES)["layers"], expected)


@pytest.mark.parametrize(("factory", "mask", "options"), MASKS)
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
    masks = dict(weight_decay_mask={"w": False, "b": True}, trust_ratio_mask={"w": False, "b": True})
    found = after(lars(0.1, weight_decay=0.5, **masks))
    assert same(found["w"], after(lars(0.1, trust_ratio_mask=False))["w"])
    assert same(found["b"], after(lars(0.1, weight_decay=0.5))["b"])
    found = after(lars(0.1, weight_decay=0.5, **masks, overrides=[("w", dict(weight_decay=0.1))]))
    assert same(found["w"], after(lars(0.1, weight_decay=0.1, trust_ratio_mask=False))["w"])


def test_overrides_that_match_nothing_are_told_once_at_init() -> None:
    tx = lars(0.1, overrides=[("*.bais", dict(lr_scale=0.0)), ("w", dict(lr_scale=0.5))])
    with pytest.warns(UnusedOverrideWarning, match=re.escape("match no parameter: '*.bais'")) as caught:
        state = tx.init(PARAMS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    jax.eval_shape(tx.update, GRADS, state, PARAMS)
    with pytest.warns(UnusedOverrideWarning):
        jax.eval_shape(tx.init, PARAMS)
