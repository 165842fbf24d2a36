"""Which rules may step tensors laid end to end as one vector: those whose numbers come out the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import OPTION_IDS, OPTIONS, Case

from thalweg.rules import RULES
from thalweg.spaces import numpy as xp


def steps(rule: Any, shapes: list[tuple[int, ...]], *, flat: bool) -> Any:
    """Three steps of some tensors, of each by itself or of all of them as one vector."""
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape) * (10.0**i) for i, shape in enumerate(shapes)]
    grads = [[rng.standard_normal(shape) for shape in shapes] for _ in range(3)]
    if flat:
        params, grads = [joined(params)], [[joined(each)] for each in grads]
    states = [rule.init(xp, p) for p in params]
    for t, each in enumerate(grads, 1):
        updates = [rule.update(xp, g, s, p, t=t, lr=0.1) for g, s, p in zip(each, states, params, strict=True)]
        params = [p + update.delta for p, update in zip(params, updates, strict=True)]
        states = [update.state for update in updates]
    return joined(params)


def joined(tensors: list[Any]) -> Any:
    return np.concatenate([x.ravel() for x in tensors])


SHAPES = [(3, 4), (5,), (2, 3, 2)]


@pytest.mark.parametrize(("case", "description", "options"), OPTIONS, ids=OPTION_IDS)
def test_rules_that_look_at_no_shapes_step_flat_tensors_alike(
    case: Case, description: str, options: dict[str, Any]
) -> None:
    """Were one that does said not to, its numbers would differ here."""
    known = {name: value for name, value in options.items() if name in RULES[case.name].__dataclass_fields__}
    rule = RULES[case.name](**known)
    if rule.looks_at_shapes:
        assert known.get("trust", True)
    else:
        np.testing.assert_array_equal(steps(rule, SHAPES, flat=True), steps(rule, SHAPES, flat=False))
