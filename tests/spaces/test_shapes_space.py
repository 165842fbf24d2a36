"""Arrays without numbers: the shapes and dtypes that arrays with numbers have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import EVERY
from lanes import by_turns

from thalweg.boundary import advance
from thalweg.rules import RULES
from thalweg.settings import Settings
from thalweg.spaces import numpy as with_numbers
from thalweg.spaces import shapes
from thalweg.spaces.shapes import Meter
from thalweg.storage import first_state

SHAPES = [(), (1,), (7,), (0,), (3, 0), (5, 4), (130, 140), (3, 4, 5, 2), (2, 130, 140)]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    *((case.name, options) for case in EVERY for options in case.options.values()),
    ("LAMB", {"momentum_dtype": "float16", "weight_decay": 0.1, "phi": (0.0, 10.0)}),
    ("LAMB", {"state_dtype": "float64", "on_nonfinite": "skip", "max_grad_norm": 1.0}),
    ("Adafactor", {}),
    ("Adafactor", {"momentum": 0.9, "min_dim_size_to_factor": 2, "eps_mode": "clamp"}),
    ("Adafactor", {"factor_dims": "last2", "min_dim_size_to_factor": 0, "weight_decay": 0.1}),
    ("Kron", {}),
    ("Kron", {"geometry": "quad", "damping_mode": "expected", "merge": None}),
    ("Kron", {"geometry": "eq", "init_scale": None, "max_skew": None}),
    ("Kron", {"momentum_mode": "ema", "whiten": "momentum", "clip_mode": "rms", "precond_dtype": "float16"}),
]


def outcome(space: Any, rule: str, options: dict[str, Any], p: Any, g: Any) -> dict[str, tuple[Any, str]]:
    setting = Settings(RULES[rule], options).base
    state = first_state(space, setting.rule_at(1), setting.handling, p)
    result = advance(
        space, setting.rule_at(1), setting.handling, p, g, state, t=1, lr=0.1, lr_scale=1.0, tensor=7, grad_scale=0.5
    )
    news = {"p": result.p, **{f"new {key}": entry for key, entry in result.state.items()}}
    return {key: (space.shape(x), space.dtype(x)) for key, x in {**state, **news}.items()}


@pytest.mark.slow
@by_turns()
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rule", "options"), OPTIONS)
def test_a_step_has_the_shapes_and_dtypes_that_it_has_with_numbers(
    rule: str, options: dict[str, Any], dtype: str
) -> None:
    for shape in SHAPES:
        meter = Meter()
        found = outcome(shapes, rule, options, meter.array(shape, dtype), meter.array(shape, dtype))
        random = np.random.default_rng(0)
        p, g = (np.asarray(random.standard_normal(shape), dtype) for _ in range(2))
        with np.errstate(all="ignore"):
            assert found == outcome(with_numbers, rule, options, p, g), shape


def test_there_is_no_truth_in_it() -> None:
    x = Meter().array((2, 2), "float32")
    with pytest.raises(TypeError, match="no truth value"):
        bool(x > 0)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        x + Meter().array((3, 2), "float32")
