"""Run an optimizer of ours and a published one over the same gradients, and measure the difference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thalweg.numpy import Optimizer

SHAPES = [(24, 40), (40, 24), (20, 18, 3, 3), (17,), (1, 30)]
STEPS = 30


def problem(
    shapes: Sequence[tuple[int, ...]] = SHAPES, steps: int = STEPS, seed: int = 0
) -> tuple[list[Any], list[list[Any]]]:
    """First parameters, and gradients for each step: of varied scale, with rows and columns that differ."""
    rng = np.random.default_rng(seed)
    params = [rng.standard_normal(shape) for shape in shapes]
    scales = [np.exp(rng.standard_normal(shape[:1] + (1,) * (len(shape) - 1))) for shape in shapes]
    grads = [
        [rng.standard_normal(p.shape) * scale * (1 + step % 3) for p, scale in zip(params, scales, strict=True)]
        for step in range(steps)
    ]
    return params, grads


def ours(optimizer: Optimizer, params: Sequence[Any], grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Final parameters under one of our optimizers."""
    current = {f"p{i}": p.copy() for i, p in enumerate(params)}
    for step in grads:
        optimizer.step(current, {f"p{i}": g for i, g in enumerate(step)})
    return list(current.values())


def torch_peer(
    make: Callable[[list[Any]], Any],
    params: Sequence[Any],
    grads: Sequence[Sequence[Any]],
    *,
    before: Callable[[Any, int], None] | None = None,
) -> list[Any]:
    """Final parameters under a torch.optim.Optimizer. Gradients are cloned: some peers overwrite them."""
    import torch

    current = [torch.nn.Parameter(torch.tensor(p)) for p in params]
    optimizer = make(current)
    for t, step in enumerate(grads, 1):
        for p, g in zip(current, step, strict=True):
            p.grad = torch.tensor(g)
        if before is not None:
            before(optimizer, t)
        optimizer.step()
    return [p.detach().numpy() for p in current]


def optax_peer(transformation: Any, params: Sequence[Any], grads: Sequence[Sequence[Any]]) -> list[Any]:
    """Final parameters under an optax transformation."""
    import jax
    import jax.numpy as jnp
    import optax

    current = [jnp.asarray(p) for p in params]
    state = transformation.init(current)
    update = jax.jit(transformation.update)
    for step in grads:
        updates, state = update([jnp.asarray(g) for g in step], state, current)
        current = optax.apply_updates(current, updates)
    return [np.asarray(p) for p in current]


def error(first: Sequence[Any], second: Sequence[Any], start: Sequence[Any]) -> float:
    """The largest difference over the largest displacement."""
    difference = max(np.abs(a - b).max() for a, b in zip(first, second, strict=True))
    displacement = max(np.abs(b - p).max() for b, p in zip(second, start, strict=True))
    assert displacement > 0, "nothing moved: this comparison would prove nothing"
    return float(difference / displacement)
