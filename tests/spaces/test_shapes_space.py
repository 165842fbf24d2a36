"""Arrays without numbers: the shapes and dtypes that arrays with numbers have, and how long they live."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cases import EVERY
from lanes import by_turns, one_in

from thalweg.arrays import Squares
from thalweg.boundary import advance
from thalweg.rules import RULES
from thalweg.settings import Settings
from thalweg.spaces import numpy as with_numbers
from thalweg.spaces import shapes
from thalweg.spaces.shapes import Meter, Reduction
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
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rule", "options"), OPTIONS)
def test_a_step_has_the_shapes_and_dtypes_that_it_has_with_numbers(
    rule: str, options: dict[str, Any], dtype: str, library: Any
) -> None:
    for shape in SHAPES:
        meter = Meter(library)
        found = outcome(shapes, rule, options, meter.array(shape, dtype), meter.array(shape, dtype))
        random = np.random.default_rng(0)
        p, g = (np.asarray(random.standard_normal(shape), dtype) for _ in range(2))
        with np.errstate(all="ignore"):
            assert found == outcome(with_numbers, rule, options, p, g), shape


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "options"), one_in(36, OPTIONS))
def test_nothing_outlives_a_step(rule: str, options: dict[str, Any]) -> None:
    meter = Meter("numpy")
    p, g = meter.array((130, 140), "float32"), meter.array((130, 140), "float32")
    meter.begin()
    outcome(shapes, rule, options, p, g)
    gc.collect()
    assert meter.live == meter.start
    assert meter.extra > 0


def test_views_share_memory_and_copies_do_not() -> None:
    meter = Meter("torch")
    x = meter.array((32, 48), "float32")
    meter.begin()
    views = [
        shapes.reshape(x, (16, 2, 48)),
        shapes.swapaxes(x, 0, 1),
        shapes.reshape(shapes.swapaxes(x, 0, 1), (48, 32)),
    ]
    views.append(shapes.reshape(shapes.swapaxes(shapes.reshape(x, (1, 32, 48)), 0, 1), (32, 48)))
    assert meter.extra == 0
    copied = shapes.reshape(shapes.swapaxes(x, 0, 1), (32 * 48,))
    assert meter.extra == copied.nbytes == x.nbytes
    del x, views
    assert meter.live == copied.nbytes


def test_products_are_counted() -> None:
    meter = Meter("torch")
    x, y = meter.array((2, 5, 7), "float32"), meter.array((2, 7, 3), "float32")
    assert shapes.matmul(x, y).shape == (2, 5, 3)
    assert meter.flops == 2 * 2 * 5 * 7 * 3
    assert meter.product_bytes == 4 * 2 * (35 + 21 + 15)


def test_memory_is_counted_in_blocks_and_at_its_most() -> None:
    meter = Meter()
    x = meter.array((100,), "float32")
    assert meter.live == 512
    meter.begin()
    y = x + 1.0
    del y
    assert (meter.live, meter.extra) == (512, 512)


def test_reductions_are_noted() -> None:
    x = Meter().array((5, 7), "float32")
    shapes.sums((x, None), Squares(x, (0,)))
    shapes.amax(x, (1,))
    sums, largest = x.meter.reductions
    assert sums == [Reduction("sum", (5, 7), "float32", None), Reduction("sum", (5, 7), "float32", (0,))]
    assert largest == [Reduction("max", (5, 7), "float32", (1,))]


def test_there_is_no_truth_in_it() -> None:
    x = Meter().array((2, 2), "float32")
    with pytest.raises(TypeError, match="no truth value"):
        bool(x > 0)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        x + Meter().array((3, 2), "float32")
