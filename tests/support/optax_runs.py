"""Runs of gradient transformations: over trees of parameters, beside thalweg.numpy, and over one small tree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tolerances import FLOAT64, SPACE

from thalweg.optax import adafactor, kron, lamb, lars

# ---- trees of parameters, and how far two results are apart

STEPS = 30
#: Matrices above and below 128, a bias of zeros, three and four axes, a scalar, two leaves of equal shape.
SHAPES: dict[str, Any] = {
    "layers": [{"w": (136, 144), "bias": (144,)}, {"w": (24, 40)}, {"w": (24, 40)}],
    "conv": (3, 3, 20, 18),
    "deep": (3, 130, 129),
    "gain": (),
}
#: The same with fewer leaves, for programs of which many are compiled.
FEWER: dict[str, Any] = {name: SHAPES[name] for name in ("layers", "gain")}

#: Masks for them: a whole tree, and a prefix of one.
TREE: dict[str, Any] = {
    "layers": [{"w": True, "bias": False}, {"w": False}, {"w": True}],
    "conv": True,
    "deep": False,
    "gain": False,
}
PREFIX = {"layers": False, "conv": True, "deep": True, "gain": False}


def matrices(params: Any) -> Any:
    """A mask that is a function of the parameters."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


def falling(count: Any) -> Any:
    """A schedule."""
    return 0.1 / (count + 1)


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def problem(shapes: Any = None, *, steps: int = STEPS, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, Any]:
    """First parameters, and gradients with a leading axis of steps: of varied scale, with rows that differ.

    The bias of the first layer is zero.
    """
    rng = np.random.default_rng(seed)

    def noise(shape: tuple[int, ...]) -> Any:
        rows = np.exp(rng.standard_normal((*shape[:1], *(1,) * (len(shape) - 1))))
        stages = 1 + np.arange(steps).reshape((steps,) + (1,) * len(shape)) % 3
        return (rng.standard_normal((steps, *shape)) * rows * stages).astype(dtype)

    shapes = SHAPES if shapes is None else shapes
    params = jax.tree.map(lambda shape: np.asarray(rng.standard_normal(shape)).astype(dtype), shapes, is_leaf=is_shape)
    if "layers" in params:
        params["layers"][0]["bias"] = np.zeros_like(params["layers"][0]["bias"])
    return params, jax.tree.map(noise, shapes, is_leaf=is_shape)


def fitting(mask: Any, params: Any) -> Any:
    """A mask for SHAPES as one for these parameters."""
    return {name: mask[name] for name in params} if isinstance(mask, dict) else mask


def pulled(noise: Any, params: Any) -> Any:
    """Gradients that depend on the parameters too: all are drawn towards zero."""
    return jax.tree.map(lambda n, p: n + 0.3 * p, noise, params)


#: Six sevenths of the time would go into machine code that is run once.
SOON = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def scanned(transformation: Any, params: Any, grads: Any, start: Callable[[Any], Any] = lambda s: s) -> Any:
    """Parameters and state after all gradients; ``start`` changes the first state."""

    def step(carry: Any, noise: Any) -> Any:
        p, state = carry
        updates, state = transformation.update(pulled(noise, p), state, p)
        return (optax.apply_updates(p, updates), state), None

    return jax.lax.scan(step, (params, start(transformation.init(params))), grads)[0]


def compiled(transformation: Any, params: Any, grads: Any, *, start: Callable[[Any], Any] = lambda s: s) -> Any:
    """The same as one program."""
    every = jax.jit(lambda p, g: scanned(transformation, p, g, start), compiler_options=SOON)
    return every(params, grads)


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def error(first: Any, second: Any, start: Any) -> float:
    """The largest difference over the largest displacement."""
    ours, theirs, before = leaves(first), leaves(second), leaves(start)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    difference = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
    displacement = max(np.abs(b - p).max() for b, p in zip(theirs, before, strict=True))
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    return float(difference / displacement)


# ---- beside thalweg.numpy: the same options, the same parameters and state

#: Options of rules under their names in thalweg.optax, where these are others.
NAMES = {
    "Adafactor": {
        "beta2_decay": "decay_rate",
        "clip_threshold": "clipping_threshold",
        "weight_decay": "weight_decay_rate",
        "scale_parameter": "multiply_by_parameter_scale",
        "momentum_dtype": "dtype_momentum",
    }
}
#: Options of a pair of numbers that thalweg.optax has apart.
PAIRS = {"LAMB": {"betas": ("b1", "b2")}, "Adafactor": {"eps": ("eps", "min_scale")}}
#: The defaults of rules where thalweg.optax has those of optax.
DEFAULTS = {
    "LARS": {"norm_mode": "paper"},
    "Adafactor": {"relative_step": False, "weight_decay_mode": "alpha", "decay_rate": 0.8},
}


def translated(rule: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a rule as thalweg.optax calls them."""
    # without a trust ratio there are no norms
    result: dict[str, Any] = dict(DEFAULTS.get(rule, {})) if options.get("trust", True) else {}
    for name, value in options.items():
        if name in PAIRS.get(rule, {}):
            result |= dict(zip(PAIRS[rule][name], value, strict=True))
        else:
            result[NAMES.get(rule, {}).get(name, name)] = value
    if rule == "Adafactor" and result.get("momentum") is not None:
        result.setdefault("dtype_momentum", "float64")
    return result


def by_name(tree: Any) -> dict[str, Any]:
    """The leaves of a tree under their paths, as numpy's arrays of their own."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.array(leaf) for path, leaf in pairs}


def state_by_name(state: Any, params: Any) -> dict[str, dict[str, Any]]:
    """The state of each parameter under the keys of checkpoints."""
    names, structure = list(by_name(params)), jax.tree.structure(params)
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for field in state._fields:
        if field in ("count", "skipped"):
            continue
        for name, value in zip(names, structure.flatten_up_to(getattr(state, field)), strict=True):
            if isinstance(value, tuple):
                found[name] |= {f"{field}_{i}": np.asarray(part) for i, part in enumerate(value)}
            elif value is not None:
                found[name][field] = np.asarray(value)
    return found


def reference(optimizer: Any, params: Any, grads: Any) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Parameters and state by name after all gradients, under an optimizer of thalweg.numpy."""
    current, noise = by_name(params), by_name(grads)
    for t in range(len(next(iter(noise.values())))):
        optimizer.step(current, pulled({name: n[t] for name, n in noise.items()}, current))
    return current, {name: {k: v for k, v in optimizer.state[name].items() if k != "step"} for name in current}


def assert_equal(mine: Any, optimizer: Any, shapes: Any, *, tolerance: float = FLOAT64) -> Any:
    """Both from the same start over 30 steps in float64; parameters, and every entry of the state."""
    params, grads = problem(shapes)
    expected, expected_state = reference(optimizer, params, grads)
    trained, state = compiled(mine, params, grads)
    found, first = by_name(trained), by_name(params)
    assert found.keys() == expected.keys()
    displacement = max(np.abs(expected[name] - first[name]).max(initial=0) for name in first)
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    for name in first:
        assert np.abs(found[name] - expected[name]).max(initial=0) < tolerance * displacement, name
    entries = state_by_name(state, params)
    for name, own in expected_state.items():
        assert entries[name].keys() == own.keys(), name
        for key, entry in own.items():
            assert entries[name][key].shape == entry.shape, (name, key)
            assert entries[name][key].dtype == entry.dtype, (name, key)
            size = max(1.0, np.abs(entry).max(initial=0))
            bound = SPACE["float64" if entry.dtype == np.float64 else "float32"] * size
            assert np.abs(entries[name][key] - entry).max(initial=0) <= bound, (name, key)
    return state


# ---- all four, with options that compile soon, over a small tree

Tree: TypeAlias = Any
MADE: dict[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
    "adafactor": partial(adafactor, min_dim_size_to_factor=3, momentum=0.9),
    "lamb": partial(lamb, weight_decay=0.1),
    "lars": partial(lars, trust_coefficient=0.1),
    "kron": partial(kron, damping_mode="expected", max_size_dense=0),
}
each = pytest.mark.parametrize("name", MADE)
PARAMS = {"w": jnp.cos(jnp.arange(12, dtype=jnp.float32)).reshape(4, 3), "b": jnp.array([1.0, 2.0, -0.5], jnp.float32)}
GRADS = jax.tree.map(lambda p: jnp.sin(3 * p + 1), PARAMS)


def run(tx: Any, params: Tree = PARAMS, grads: Tree = GRADS, steps: int = 2, **extra: Any) -> tuple[Tree, Any]:
    """Parameters and state after some steps, compiled once."""
    state = tx.init(params)
    update = jax.jit(lambda grads, state, params: tx.update(grads, state, params, **extra))
    for _ in range(steps):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert update._cache_size() == 1
    return params, state
