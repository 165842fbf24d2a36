"""Native code against its rule: every option, in every precision."""

from __future__ import annotations

import pytest
from cases import FUSED_OPTIONS, Case
from lanes import by_turns, one_in
from side_by_side import NARROW, agree, draw, draw_gradients, every_dtype, every_rule, needs_core

pytestmark = [needs_core, pytest.mark.slow]

STEPS = 4
#: Smaller and larger than a tile, a few with axes before, between and behind those that may be factored.
SHAPES = {
    "number": (),
    "one": (1,),
    "vector": (130,),
    "row": (1, 5),
    "matrix": (70, 40),
    "square": (33, 33),
    "wide": (3, 2100),
    "conv": (9, 7, 3, 2),
    "before": (3, 8, 10),
    "between": (12, 3, 11),
    "longer than a tile": (1100,),
}


@by_turns()
@pytest.mark.parametrize(("case", "options"), one_in(8, FUSED_OPTIONS))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_it_equals_its_rule(case: Case, options: dict, dtype: str) -> None:
    grads = draw_gradients(SHAPES, dtype, STEPS)
    agree(case.name, draw(SHAPES, dtype), grads, **options, moves=options.get("lr") != 0.0)


@by_turns()
@pytest.mark.parametrize(("case", "options"), one_in(8, FUSED_OPTIONS, first=4))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_it_equals_its_rule_in_sixteen_bits(case: Case, options: dict, dtype: str) -> None:
    small = options.get("lr") == 0.0 or bool(options.get("warmup_init"))
    grads = draw_gradients(SHAPES, dtype, 3)
    agree(case.name, draw(SHAPES, dtype), grads, **options, moves=not small, lockstep=True)


@by_turns()
@every_rule
@every_dtype
def test_zeros_stay_defined(rule: str, dtype: str) -> None:
    """Parameters of zero, gradients of zero, and both, for two steps before the first gradient that is not."""
    shapes = {"p": (40, 30), "g": (40, 30), "both": (40, 30), "neither": (40, 30)}
    params = draw(shapes, dtype)
    params["p"][...] = params["both"][...] = 0
    grads = draw_gradients(shapes, dtype, 3)
    for step in grads[:2]:
        step["g"][...] = step["both"][...] = 0
    options = dict(min_dim_size_to_factor=2) if rule == "Adafactor" else {}
    agree(rule, params, grads, **options, lockstep=dtype in NARROW)


@every_rule
def test_rows_and_columns_of_zeros(rule: str) -> None:
    """What has never had a gradient does not move."""
    shapes = {"w": (40, 30)}
    for dtype in ("float32", "float64"):
        params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 3)
        for step in grads:
            step["w"][5] = step["w"][:, 7] = 0
        agree(rule, params, grads, **(dict(min_dim_size_to_factor=2) if rule == "Adafactor" else {}))
        if rule == "Adafactor":
            agree(rule, params, grads, min_dim_size_to_factor=2, eps=(0.0, 1e-3))
