"""Options by leaf: stacked layers, masks, overrides by name."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tolerances
from optax_runs import GRADS, PARAMS, Tree

from thalweg import OptionError, UnusedOverrideWarning
from thalweg.optax import adafactor, kron, lamb, lars

pytestmark = pytest.mark.slow  # many small programs are compiled

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


def test_more_stacked_axes_than_a_leaf_has_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"stacked_axes=2, but parameter 'b' has shape \(3,\)"):
        lamb(0.1, stacked_axes=2).init(PARAMS)
    with pytest.raises(OptionError, match="stacked_axes"):
        lamb(0.1, stacked_axes={"w": -1, "b": 0}).init(PARAMS)


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


def test_two_masks_concern_each_its_own_options() -> None:
    masks = dict(weight_decay_mask={"w": False, "b": True}, trust_ratio_mask={"w": False, "b": True})
    found = after(lars(0.1, weight_decay=0.5, **masks))
    assert same(found["w"], after(lars(0.1, trust_ratio_mask=False))["w"])
    assert same(found["b"], after(lars(0.1, weight_decay=0.5))["b"])


@pytest.mark.parametrize(("factory", "mask", "options"), MASKS)
def test_masks_that_do_not_fit_are_refused(factory: Any, mask: str, options: dict[str, Any]) -> None:
    for wrong in ({"w": True}, {"w": True, "b": True, "c": True}, [True, False], {"w": {"x": True}, "b": True}):
        for given in (wrong, lambda _, wrong=wrong: wrong):
            with pytest.raises(OptionError, match=mask):
                factory(0.1, **options, **{mask: given}).init(PARAMS)
    for wrong in ({"w": "yes", "b": True}, {"w": 2, "b": True}, {"w": 0.5, "b": True}):
        with pytest.raises(OptionError, match=rf"{mask} must be True or False for parameter 'w'"):
            factory(0.1, **options, **{mask: wrong}).init(PARAMS)


def test_overrides_by_name_win_over_masks() -> None:
    options: Any = dict(weight_decay=0.5, mask={"w": True, "b": False})
    found = after(lamb(0.1, **options, overrides=[("b", dict(weight_decay=0.1))]))
    assert same(found["b"], after(lamb(0.1, weight_decay=0.1))["b"])
    assert same(found["w"], after(lamb(0.1, weight_decay=0.5))["w"])


def test_overrides_that_match_nothing_are_told_once_at_init() -> None:
    tx = lars(0.1, overrides=[("*.bais", dict(lr_scale=0.0)), ("w", dict(lr_scale=0.5))])
    with pytest.warns(UnusedOverrideWarning, match=re.escape("match no parameter: '*.bais'")) as caught:
        state = tx.init(PARAMS)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    jax.eval_shape(tx.update, GRADS, state, PARAMS)
    with pytest.warns(UnusedOverrideWarning):
        jax.eval_shape(tx.init, PARAMS)
