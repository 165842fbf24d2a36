"""Run gradient transformations of optax over trees of parameters, and measure how far two results are apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
    import jax

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
    import jax

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
    import jax

    return jax.tree.map(lambda n, p: n + 0.3 * p, noise, params)


def compiled(transformation: Any, params: Any, grads: Any, *, start: Callable[[Any], Any] = lambda s: s) -> Any:
    """Parameters and state after all gradients, as one program; ``start`` changes the first state."""
    import jax
    import optax

    def step(carry: Any, noise: Any) -> Any:
        p, state = carry
        updates, state = transformation.update(pulled(noise, p), state, p)
        return (optax.apply_updates(p, updates), state), None

    def every(p: Any, grads: Any) -> Any:
        return jax.lax.scan(step, (p, start(transformation.init(p))), grads)[0]

    # half of the time goes into machine code that is run once
    return jax.jit(every, compiler_options={"xla_backend_optimization_level": 0})(params, grads)


def one_by_one(transformation: Any, params: Any, grads: Any, *, start: Callable[[Any], Any] = lambda s: s) -> Any:
    """The same, step by step and without a program of its own."""
    import jax
    import jax.numpy as jnp
    import optax

    params = jax.tree.map(jnp.asarray, params)
    state = start(transformation.init(params))
    for t in range(len(jax.tree.leaves(grads)[0])):
        noise = jax.tree.map(lambda g, t=t: g[t], grads)
        updates, state = transformation.update(pulled(noise, params), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def leaves(tree: Any) -> list[Any]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def error(first: Any, second: Any, start: Any) -> float:
    """The largest difference over the largest displacement."""
    ours, theirs, before = leaves(first), leaves(second), leaves(start)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    difference = max(np.abs(a - b).max() for a, b in zip(ours, theirs, strict=True))
    displacement = max(np.abs(b - p).max() for b, p in zip(theirs, before, strict=True))
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    return float(difference / displacement)
