"""Faulty gradient transformations, each with one mistake, and the checks that must catch it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

COUNTER = itertools.count()
Direction = Callable[..., Any]


def made(
    direction: Direction = lambda m, every, params: m,
    *,
    init: Any = lambda params: {"m": jax.tree.map(jnp.zeros_like, params)},
    kind: Any = optax.GradientTransformation,
) -> Callable[..., Any]:
    """Momentum, with another direction for each leaf: of its average, all averages, and the parameters."""

    def transformation(learning_rate: Any = 0.1) -> Any:
        def update(grads: Any, state: Any, params: Any = None) -> Any:
            m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
            updates = jax.tree.map(lambda leaf: -learning_rate * direction(leaf, m, params), m)
            return updates, {**state, "m": m}

        return kind(init, update)

    return transformation


def norm(every: Any) -> Any:
    return 1 + optax.global_norm(every)


def with_update(change: Callable[..., Any]) -> Callable[..., Any]:
    """Momentum whose update is changed: a function of the plain update, then of what update takes."""

    def transformation(learning_rate: Any = 0.1) -> Any:
        plain = made()(learning_rate)
        return optax.GradientTransformation(plain.init, lambda g, s, p=None: change(plain.update, g, s, p))

    return transformation


def written_state(plain: Any, grads: Any, state: Any, params: Any) -> Any:
    updates, new = plain(grads, state, params)
    state["m"] = new["m"]
    return updates, state


def elsewhere(learning_rate: Any = 0.1) -> Any:
    plain, held = made()(learning_rate), {}

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        updates, held["state"] = plain.update(grads, held.get("state", plain.init(params)), params)
        return updates, state

    return optax.GradientTransformation(lambda params: {"t": jnp.zeros(())}, update)


def misread(wrong: Callable[[Any], bool], learning_rate: Any) -> Any:
    """Half of the learning rate where it is of another kind."""
    if callable(learning_rate):
        return made()(0.5 * learning_rate(0))
    return made()(0.5 * learning_rate if wrong(learning_rate) else learning_rate)


half = made(init=lambda params: {"m": jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float16), params)})
concrete = made(lambda m, every, params: m * float(m.max()))
joined = made(lambda m, every, params: m / norm(every))

#: The faulty transformation that each check must catch.
FAULTS: dict[str, Any] = {
    "step-moves-parameters": made(lambda m, every, params: m * (m.shape[0] != 5)),
    "trees-are-kept": with_update(lambda plain, g, s, p: (jax.tree.leaves(plain(g, s, p)[0]), s)),
    "empty-trees": made(init=lambda params: {"m": params, "first": jax.tree.leaves(params)[0]}),
    "inputs-untouched": with_update(written_state),
    "extra-arguments": made(kind=optax.GradientTransformationExtraArgs),
    "state-keeps-its-form": half,
    "deterministic": made(lambda m, every, params: m * (1 + next(COUNTER))),
    "jit-agrees": made(lambda m, every, params: m * (2 if isinstance(m, jax.core.Tracer) else 1)),
    "compiled-once": half,
    "scan-agrees": half,
    "vmap-agrees": concrete,
    "independent-of-other-parameters": joined,
    "descends": made(lambda m, every, params: -m),
    "zero-gradients": made(lambda m, every, params: m / jnp.sqrt((m * m).sum())),
    "resumes-to-the-bit": elsewhere,
    "bfloat16-moves": made(lambda m, every, params: m.astype(jnp.float32)),
    "scalars-and-empty": made(lambda m, every, params: m / m.std()),
    "params-asked-for": made(lambda m, every, params: m + 0 * jax.tree.leaves(params)[0].sum()),
    "misspelt-option": lambda learning_rate=0.1, **options: made()(learning_rate),
    "nan-stays-local": joined,
    "schedules": lambda learning_rate=0.1: misread(lambda _: False, learning_rate),
    "injected-hyperparameters": lambda learning_rate=0.1: misread(lambda r: not isinstance(r, float), learning_rate),
    "masked": made(lambda m, every, params: m / len(jax.tree.leaves(every))),
    "multi-steps": concrete,
}
