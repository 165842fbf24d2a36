"""What native code does not step: who insists is told which parameter and why, and else the reference steps it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits
from side_by_side import made, needs_core

from thalweg.errors import OptionError

pytestmark = needs_core

FACTORED: dict[str, Any] = dict(min_dim_size_to_factor=1, momentum=0.9)
BEHIND, CODED = (12, 11, 5, 5, 6), (64, 64, 3, 3)


#: (rule, shape, options, order of the parameter in memory, words).
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any], Any, str]] = [
    ("Adafactor", BEHIND, FACTORED, "C", "parameter 'w': .* has 150 elements behind axis 1"),
    ("Adafactor", CODED, dict(FACTORED, state_dtype="int8"), "C", "in pieces that cut its groups of 64"),
    ("LAMB", (40, 33), {}, "F", "parameter 'w': it, or its state, is not in C order"),
]


@pytest.mark.parametrize(("rule", "shape", "options", "order", "words"), REFUSED, ids=str)
def test_what_is_not_served(rule: str, shape: Any, options: dict[str, Any], order: Any, words: str) -> None:
    shapes = {"w": shape, "b": (7,)}
    params, (step,) = draw(shapes, "float32"), draw_gradients(shapes, "float32", 1)
    params["w"] = np.array(params["w"], order=order)
    before = bits(params)
    optimizer = made(rule, "fused", **options)
    with pytest.raises(OptionError, match=words):
        optimizer.step(params, step)
    assert (bits(params), optimizer.state) == (before, {})
    other = made(rule, "auto", **options)
    other.step(params, step)
    assert other.engine == "fused + reference"
    assert bits(params) != before


def test_a_tensor_with_gaps_is_named() -> None:
    torch = pytest.importorskip("torch")
    from thalweg.torch import LAMB

    named = [("fine", torch.nn.Parameter(torch.ones(3, 4))), ("gaps", torch.nn.Parameter(torch.ones(3, 8)[:, ::2]))]
    for _, p in named:
        p.grad = torch.ones(3, 4)
    optimizer = LAMB(named, lr=0.1, engine="fused")
    with pytest.raises(OptionError, match=r"engine='fused' cannot run .*'gaps'.*strides"):
        optimizer.step()
    assert all((p == 1).all() for _, p in named)
    assert not optimizer.state
