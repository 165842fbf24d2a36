"""Arrays without numbers: the shapes and dtypes that arrays with numbers have, and how long they live."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from cases import EVERY
from lanes import one_in

from thalweg.boundary import advance
from thalweg.rules import RULES
from thalweg.settings import Settings
from thalweg.spaces import numpy as with_numbers
from thalweg.spaces import shapes
from thalweg.spaces.shape_arrays import Ledger
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


@pytest.mark.in_turn
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("rule", "options"), OPTIONS)
def test_a_step_has_the_shapes_and_dtypes_that_it_has_with_numbers(
    rule: str, options: dict[str, Any], dtype: str, library: Any
) -> None:
    for shape in SHAPES:
        ledger = Ledger(library)
        found = outcome(shapes, rule, options, ledger.array(shape, dtype), ledger.array(shape, dtype))
        random = np.random.default_rng(0)
        p, g = (np.asarray(random.standard_normal(shape), dtype) for _ in range(2))
        with np.errstate(all="ignore"):
            assert found == outcome(with_numbers, rule, options, p, g), shape


@pytest.mark.parametrize(("rule", "options"), one_in(9, OPTIONS))
def test_nothing_outlives_a_step(rule: str, options: dict[str, Any]) -> None:
    ledger = Ledger("numpy")
    p, g = ledger.array((130, 140), "float32"), ledger.array((130, 140), "float32")
    ledger.begin()
    outcome(shapes, rule, options, p, g)
    gc.collect()
    assert ledger.live == p.nbytes + g.nbytes
    assert ledger.extra > 0


def test_views_share_memory_and_copies_do_not() -> None:
    ledger = Ledger("torch")
    x = ledger.array((4, 6), "float32")
    ledger.begin()
    views = [shapes.reshape(x, (2, 2, 6)), shapes.swapaxes(x, 0, 1), shapes.reshape(shapes.swapaxes(x, 0, 1), (6, 4))]
    views.append(shapes.reshape(shapes.swapaxes(shapes.reshape(x, (1, 4, 6)), 0, 1), (4, 6)))
    assert ledger.extra == 0
    copied = shapes.reshape(shapes.swapaxes(x, 0, 1), (24,))
    assert ledger.extra == copied.nbytes == x.nbytes
    del x, views
    assert ledger.live == copied.nbytes


def test_what_numpy_writes_over_its_operands_is_not_counted_twice() -> None:
    size = 400_000

    def needed(library: Any, expression: Any) -> float:
        ledger = Ledger(library)
        x, y = ledger.array((size // 4,), "float32"), ledger.array((size // 4,), "float32")
        ledger.begin()
        expression(x, y)
        return ledger.extra / size

    reused = [
        lambda x, y: (x + y) + y,
        lambda x, y: y * (x * 2),
        lambda x, y: (x + y) - y,
        lambda x, y: -(x + y),
        lambda x, y: (x * 2) / y,
    ]
    fresh = [lambda x, y: y - (x + y), lambda x, y: (x + y) * 2, lambda x, y: 2 * (x + y), lambda x, y: 1 - (x + y)]
    assert [needed("numpy", one) for one in reused] == [1] * len(reused)
    assert [needed("numpy", one) for one in fresh] == [2] * len(fresh)
    assert [needed("torch", one) for one in (*reused, *fresh)] == [2] * (len(reused) + len(fresh))


def test_products_are_counted() -> None:
    ledger = Ledger("torch")
    x, y = ledger.array((2, 5, 7), "float32"), ledger.array((2, 7, 3), "float32")
    assert shapes.matmul(x, y).shape == (2, 5, 3)
    assert ledger.flops == 2 * 2 * 5 * 7 * 3
    assert ledger.product_bytes == 4 * 2 * (35 + 21 + 15)


def test_there_is_no_truth_in_it() -> None:
    x = Ledger().array((2, 2), "float32")
    with pytest.raises(TypeError, match="no truth value"):
        bool(x > 0)
    with pytest.raises(ValueError, match="cannot be broadcast"):
        x + Ledger().array((3, 2), "float32")
