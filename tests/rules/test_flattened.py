"""Which rules may step tensors laid end to end as one vector: those whose numbers come out the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import OPTION_IDS, OPTIONS, Case
from drive import gradients, run

SHAPES = [(3, 4), (5,), (2, 3, 2)]


def joined(tensors: Any) -> Any:
    return np.concatenate([x.ravel() for x in tensors])


@pytest.mark.parametrize(("case", "description", "options"), OPTIONS, ids=OPTION_IDS)
def test_rules_that_look_at_no_shapes_step_flat_tensors_alike(
    case: Case, description: str, options: dict[str, Any]
) -> None:
    """Were one that does said not to, its numbers would differ here."""
    rule, drawn = case.rule(**options), [gradients(shape, 3, seed=i) for i, shape in enumerate(SHAPES)]
    if rule.looks_at_shapes:
        assert options.get("trust", True)
        return
    apart = [run(rule, p, grads, lr=0.1)[0] for p, grads in drawn]
    flat = run(
        rule, joined(p for p, _ in drawn), [joined(step) for step in zip(*(g for _, g in drawn), strict=True)], lr=0.1
    )
    np.testing.assert_array_equal(flat[0], joined(apart))
