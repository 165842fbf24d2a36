"""Drive a rule over a space, through the same boundary as the front ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from thalweg.boundary import advance
from thalweg.rules import Rule
from thalweg.settings import Numerics
from thalweg.spaces import numpy as reference
from thalweg.storage import first_state


def gradients(shape: tuple[int, ...], steps: int, *, seed: int = 0, dtype: Any = np.float64) -> tuple[Any, list[Any]]:
    """A parameter and gradients for some steps."""
    rng = np.random.default_rng(seed)
    draw = [np.asarray(rng.standard_normal(shape)).astype(dtype) for _ in range(steps + 1)]
    return draw[0], draw[1:]


def run(
    rule: Rule,
    p: Any,
    grads: Sequence[Any],
    *,
    lr: float | None,
    xp: Any = reference,
    numerics: Numerics | None = None,
    step: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
    count: Callable[[int], Any] = int,
    tensor: int = 1,
) -> tuple[Any, dict[str, Any]]:
    """The parameter and its state after all gradients. ``step`` wraps the step, to compile it for example."""
    numerics = numerics or Numerics()

    def one(p: Any, g: Any, s: Any, t: Any) -> Any:
        result = advance(xp, rule, numerics, p, g, s, t=t, lr=lr, lr_scale=1.0, tensor=tensor)
        return result.p, result.state

    one = step(one)
    s = first_state(xp, rule, numerics, p)
    with np.errstate(all="ignore"):
        for t, g in enumerate(grads, 1):
            p, s = one(p, g, s, count(t))
    return p, s
