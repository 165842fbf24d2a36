"""Gradient transformations of optax: pure functions of trees."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from thalweg.check.subject import Subject

SHAPES = {"a": (6, 4), "b": {"c": (6, 4), "d": (5, 3)}}


def draw(shape: tuple[int, ...], *key: int) -> Any:
    return jnp.asarray(np.random.default_rng(key).normal(size=shape) * 0.1, jnp.float32)


def tree(t: int, shapes: Any = SHAPES) -> Any:
    """Numbers for parameters (t = 0) or for the gradients of step t, the same for a shape in the same place."""
    flat, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    return jax.tree.unflatten(structure, [draw(shape, t, place) for place, shape in enumerate(flat)])


def train(made: Any, params: Any, steps: int, state: Any = None, first: int = 1, update: Any = None) -> tuple[Any, Any]:
    state = made.init(params) if state is None else state
    for t in range(first, first + steps):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), tree(t), params)
        updates, state = (update or made.update)(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def update_once(made: Any, grads: Any, params: Any) -> Any:
    """The updates of a first step."""
    return made.update(grads, made.init(params), params)[0]


def assert_finite(updates: Any) -> None:
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates)):
        pytest.fail("an update is not finite")


def rate_of(s: Subject) -> float:
    """Its learning rate; not offered where it is not given as a number."""
    rate = s.options.get("learning_rate")
    if not isinstance(rate, float):
        pytest.skip("learning_rate is not given as a number")
    return rate


def assert_same(one: Any, other: Any, where: str, rtol: float = 0.0) -> None:
    """Fail unless two trees are equal, or the same up to a share of their size."""
    if str(jax.tree.structure(one)) != str(jax.tree.structure(other)):
        pytest.fail(f"{where}: the structure is another one")
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(other), strict=True):
        if jnp.shape(x) != jnp.shape(y) or jnp.result_type(x) != jnp.result_type(y):
            sides = (f"{jnp.result_type(side)} {jnp.shape(side)}" for side in (x, y))
            pytest.fail(f"{where}: {jax.tree_util.keystr(path)} is {' and not '.join(sides)}")
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        apart = np.abs(x - y).max(initial=0.0)
        if not apart <= rtol * np.abs(y).max(initial=0.0):
            pytest.fail(f"{where}: {jax.tree_util.keystr(path)} differs by up to {apart:.3g}")


def form(state: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """The structure of a tree, and shapes and dtypes of its leaves."""
    leaves = jax.tree.leaves(state)
    return str(jax.tree.structure(state)), [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def test_step_moves_parameters(s: Subject) -> None:
    """Every parameter moves within three steps."""
    params, _ = train(s.make(), tree(0), 3)
    if not all(jax.tree.leaves(jax.tree.map(lambda p, q: bool((p != q).any()), params, tree(0)))):
        pytest.fail("a parameter did not move")


def test_trees_are_kept(s: Subject) -> None:
    """Updates have the structure, shapes and dtypes of the parameters."""
    params = tree(0)
    if form(update_once(s.make(), tree(1), params)) != form(params):
        pytest.fail("updates differ from parameters in structure, shape or dtype")


def test_empty_trees(s: Subject) -> None:
    """A tree without leaves can be initialised and updated: frozen parts of models are such."""
    if jax.tree.leaves(update_once(s.make(), {}, {})):
        pytest.fail("updates of an empty tree have leaves")


def test_inputs_untouched(s: Subject) -> None:
    """Parameters, gradients and state that were given are as before: the functions are pure."""
    made, params, grads = s.make(), tree(0), tree(1)
    state = made.init(params)
    before = copy.deepcopy(jax.tree.map(np.array, (params, grads, state)))
    made.update(grads, state, params)
    assert_same((params, grads, state), before, "what was given to update")


def test_extra_arguments(s: Subject) -> None:
    """Wrapped by with_extra_args_support, it takes arguments that are meant for others in its chain."""
    made, params = optax.with_extra_args_support(s.make()), tree(0)
    made.update(tree(1), made.init(params), params, value=1.0)


def test_state_keeps_its_form(s: Subject) -> None:
    """State has the same structure, shapes and dtypes after a step: lax.scan and jit need that."""
    made, params = s.make(), tree(0)
    before = made.init(params)
    _, after = made.update(tree(1), before, params)
    if form(before) != form(after):
        pytest.fail("the structure, a shape or a dtype of the state changes with a step")


def test_deterministic(s: Subject) -> None:
    """The same run gives the same bits."""
    assert_same(train(s.make(), tree(0), 4)[0], train(s.make(), tree(0), 4)[0], "the same run again")


def test_jit_agrees(s: Subject) -> None:
    """Under jit the steps are the same, up to rounding."""
    made = s.make()
    assert_same(train(made, tree(0), 3, update=jax.jit(made.update))[0], train(made, tree(0), 3)[0], "under jit", 1e-5)


def test_compiled_once(s: Subject) -> None:
    """A second step under jit compiles nothing again."""
    made, traced = s.make(), []

    def update(grads: Any, state: Any, params: Any) -> Any:
        traced.append(1)
        return made.update(grads, state, params)

    train(made, tree(0), 4, update=jax.jit(update))
    if len(traced) > 1:
        pytest.fail(f"update was traced {len(traced)} times in four steps")


def test_scan_agrees(s: Subject) -> None:
    """Within lax.scan, as whole epochs are compiled, the steps are the same."""
    made, params = s.make(), tree(0)
    grads = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[tree(t) for t in (1, 2, 3)])

    def body(carry: Any, grad: Any) -> Any:
        updates, state = made.update(grad, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    (reached, _), _ = jax.lax.scan(body, (params, made.init(params)), grads)
    assert_same(reached, train(made, params, 3)[0], "within scan", 1e-5)


def test_vmap_agrees(s: Subject) -> None:
    """Under vmap, as ensembles are trained, every member steps as by itself."""
    made = s.make()
    params, grads = (jax.tree.map(lambda a, b: jnp.stack([a, b]), tree(t), tree(t + 5)) for t in (0, 1))
    updates, _ = jax.vmap(made.update)(grads, jax.vmap(made.init)(params), params)
    alone = update_once(made, tree(1), tree(0))
    assert_same(jax.tree.map(lambda leaf: leaf[0], updates), alone, "the first of two", 1e-4)


def test_independent_of_other_parameters(s: Subject) -> None:
    """A parameter's steps do not depend on which others are in the tree."""
    s.require_not("couples_parameters")
    alone = update_once(s.make(), {"a": tree(1)["a"]}, {"a": tree(0)["a"]})
    assert_same(alone["a"], update_once(s.make(), tree(1), tree(0))["a"], "by itself", 1e-5)


def test_descends(s: Subject) -> None:
    """The sum of squares is smaller after fifty steps down it."""
    made, params = s.make(), tree(0)
    update, state = jax.jit(made.update), made.init(params)
    before = optax.global_norm(params)
    for _ in range(50):
        updates, state = update(params, state, params)
        params = optax.apply_updates(params, updates)
    if not optax.global_norm(params) < before:
        pytest.fail(f"the norm went from {float(before):.3g} to {float(optax.global_norm(params)):.3g}")


def test_zero_gradients(s: Subject) -> None:
    """Gradients of zero give finite updates."""
    assert_finite(update_once(s.make(), jax.tree.map(jnp.zeros_like, tree(0)), tree(0)))


def test_resumes_to_the_bit(s: Subject) -> None:
    """State that went through leaves and a pickle continues the run to the bit."""
    made = s.make()
    params, state = train(made, tree(0), 3)
    saved = pickle.loads(pickle.dumps([np.asarray(leaf) for leaf in jax.tree.leaves(state)]))
    again = jax.tree.unflatten(jax.tree.structure(state), [jnp.asarray(leaf) for leaf in saved])
    assert_same(train(made, params, 2, again, 4)[0], train(made, params, 2, state, 4)[0], "after resuming")


def test_bfloat16_moves(s: Subject) -> None:
    """Parameters in bfloat16 get updates in bfloat16 that are finite and not zero."""
    made, params = s.make(), jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree(0))
    grads = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree(1))
    _, state = made.update(grads, made.init(params), params)
    updates, _ = made.update(grads, state, params)  # in a first step some only look, as SOAP does
    for leaf in jax.tree.leaves(updates):
        if leaf.dtype != jnp.bfloat16 or not bool(jnp.isfinite(leaf).all()) or not bool(leaf.any()):
            pytest.fail(f"an update is {leaf.dtype}, zero or not finite")


def test_scalars_and_empty(s: Subject) -> None:
    """Parameters without dimensions, and without elements, are updated."""
    s.require_not("needs_matrices")
    params = {"scalar": jnp.float32(0.5), "empty": jnp.zeros((0, 4)), "row": jnp.ones((1, 3))}
    assert_finite(update_once(s.make(), jax.tree.map(jnp.ones_like, params), params))


def test_params_asked_for(s: Subject) -> None:
    """Where update needs parameters, it says so when they are missing."""
    made = s.make()
    try:
        updates, _ = made.update(tree(1), made.init(tree(0)))
    except Exception as error:
        if "param" not in str(error).lower():
            pytest.fail(f"{type(error).__name__} without a word about params")
        return
    assert_same(updates, update_once(made, tree(1), tree(0)), "without params")


def test_misspelt_option(s: Subject) -> None:
    """An option that does not exist is refused."""
    try:
        s.make(weight_decya=0.1)
    except (TypeError, ValueError):
        return
    pytest.fail("weight_decya=0.1: no error")


def test_nan_stays_local(s: Subject) -> None:
    """NaN in one gradient does not reach other parameters, unless the whole step is refused or skipped."""
    s.require_not("couples_parameters")
    made, params, grads = s.make(), tree(0), tree(1)
    plain = update_once(made, grads, params)
    grads["a"] = grads["a"].at[0, 0].set(jnp.nan)
    updates = update_once(made, grads, params)
    if any(bool(leaf.any()) for leaf in jax.tree.leaves(updates["b"])):
        assert_same(updates["b"], plain["b"], "beside a gradient with NaN", 1e-5)


def test_schedules(s: Subject) -> None:
    """learning_rate may be a schedule: a constant one steps as the number does."""
    rate = rate_of(s)
    reached, _ = train(s.make(learning_rate=lambda count: jnp.float32(rate)), tree(0), 3)
    assert_same(reached, train(s.make(), tree(0), 3)[0], "with a schedule", 1e-5)


def test_injected_hyperparameters(s: Subject) -> None:
    """optax.inject_hyperparams makes its learning rate a part of the state that can be set."""
    rate_of(s)
    others = [name for name in inspect.signature(s.factory).parameters if name != "learning_rate"]
    made = optax.inject_hyperparams(s.factory, static_args=others)(**s.options)
    assert_same(train(made, tree(0), 3)[0], train(s.make(), tree(0), 3)[0], "with injected hyperparameters", 1e-4)


def test_masked(s: Subject) -> None:
    """optax.masked leaves the others out and changes nothing for those it takes."""
    s.require_not("couples_parameters")
    updates = update_once(optax.masked(s.make(), {"a": True, "b": False}), tree(1), tree(0))
    assert_same(updates["a"], update_once(s.make(), tree(1), tree(0))["a"], "under a mask", 1e-5)
    assert_same(updates["b"], tree(1)["b"], "what is masked")


def test_multi_steps(s: Subject) -> None:
    """optax.MultiSteps adds up two gradients and steps with their mean."""
    made, params = optax.MultiSteps(s.make(), 2), tree(0)
    state = made.init(params)
    _, state = made.update(tree(1), state, params)
    updates, _ = made.update(tree(2), state, params)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, tree(1), tree(2))
    assert_same(updates, update_once(s.make(), mean, params), "two gradients accumulated", 1e-3)
