"""torch tensors stepped by native code: the bits of arrays of numpy, which other tests hold against their rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import FUSED_RULES
from lanes import by_turns
from side_by_side import DTYPES, draw, draw_gradients, every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, SHAPES, agree, array_of, gradients, make, parameters, side_by_side, train  # noqa: E402

import thalweg.numpy  # noqa: E402
import thalweg.torch  # noqa: E402

pytestmark = needs_core

#: Axes that may be stacked, single numbers in two of them among others.
STACKED = {"matrices": (2, 3, 5, 6), "vectors": (3, 2, 7), "numbers": (5, 6)}
#: What surrounds a rule.
HANDLING: list[dict[str, Any]] = [
    {},
    dict(maximize=True),
    dict(max_grad_norm=0.5),
    dict(on_nonfinite="raise"),
    dict(max_grad_norm=0.5, on_nonfinite="skip"),
    dict(rounding="stochastic"),
    dict(state_dtype="bfloat16"),
    dict(momentum_dtype="float16"),
    dict(stacked_axes=1),
    dict(stacked_axes=2),
]


@by_turns("options", "dtype")
@every_rule
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", HANDLING, ids=str)
def test_numpy_and_torch_give_the_same_bits(rule: str, dtype: str, options: dict[str, Any]) -> None:
    shapes = STACKED if "stacked_axes" in options else SHAPES
    options = {**FULL[rule], "weight_decay": 0.1, **options}
    arrays, named = draw(shapes, dtype), parameters(dtype, shapes)
    plain = getattr(thalweg.numpy, rule)(lr=FUSED_RULES[rule].lr, engine="fused", **options)
    optimizer = make(rule, named, **options)
    for step in draw_gradients(shapes, dtype, 3):
        plain.step(arrays, step)
    train(optimizer, named, gradients(3, dtype, shapes))
    assert optimizer.engine == plain.engine == "fused"
    # torch and numpy may add the squares of several tensors in another order: the joint norm is rounded otherwise
    rounded = 2**4 * float(np.finfo(dtype).eps) if "max_grad_norm" in options and dtype == "float64" else 0.0
    for name, p in named:
        kept = {key: array_of(optimizer.state[p][key]) for key in plain.state[name] if key != "step"}
        for key, entry in {**kept, "parameter": array_of(p)}.items():
            other = arrays[name] if key == "parameter" else plain.state[name][key]
            same = entry.tobytes() == other.tobytes()
            assert same or np.abs(entry - other).max() <= rounded * np.abs(other).max(), (name, key)
        assert array_of(p).tobytes() != draw(shapes, dtype)[name].tobytes(), name


@by_turns()
@every_rule
@pytest.mark.parametrize("lr", ["float32", "float64", "one element"])
def test_a_learning_rate_that_is_a_tensor(rule: str, lr: str) -> None:
    value = torch.tensor([0.25]) if lr == "one element" else torch.tensor(0.25, dtype=getattr(torch, lr))
    _, ours = side_by_side(rule, gradients(3), lr=value, **FULL[rule])
    named = parameters()
    train(make(rule, named, lr=0.25, **FULL[rule]), named, gradients(3))
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(ours, named, strict=True))


@every_rule
def test_groups_with_options_of_their_own_and_overrides(rule: str) -> None:
    both = []
    for engine in ("fused", "reference"):
        named = parameters("float64")
        groups: list[dict[str, Any]] = [
            dict(params=named[:2], lr=0.5, weight_decay=0.3),
            dict(params=named[2:], lr=0.01, weight_decay=0.0),
        ]
        overrides = [("conv", dict(lr_scale=0.1, weight_decay=0.2)), ("vector", dict(lr_scale=3.0))]
        optimizer = make(rule, groups, engine, overrides=overrides, **FULL[rule])
        for t, step in enumerate(gradients(5, "float64")):
            train(optimizer, named, [step])
            optimizer.param_groups[0]["lr"] *= 0.5
            if t == 2:
                optimizer.param_groups[1]["weight_decay"] = 0.05
        both.append((optimizer, named))
    assert both[0][0].engine == "fused"
    agree(*both[0], *both[1])


@every_rule
def test_models_of_mixed_dtypes(rule: str) -> None:
    """All of them in one call."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    both = []
    for engine in ("fused", "reference"):
        torch.manual_seed(0)
        named = [(str(d), torch.nn.Parameter(torch.randn(40, 30).to(d))) for d in dtypes]
        optimizer = make(rule, named, engine, **FULL[rule])
        for _, p in named:
            p.grad = torch.randn(40, 30).to(p.dtype)
        optimizer.step()
        both.append((optimizer, named))
    assert both[0][0].engine == "fused"
    agree(*both[0], *both[1])


@every_rule
def test_parameters_without_a_gradient_now_and_then(rule: str) -> None:
    steps = gradients(7, "float64")
    for t, missing in enumerate(["matrix", "vector", None, "number", "matrix", None]):
        if missing is not None:
            del steps[t][missing]
    side_by_side(rule, steps, "float64", **FULL[rule])


@every_rule
def test_empty_tensors(rule: str) -> None:
    shapes = {"empty": (0,), "no rows": (0, 4), "w": (5, 6)}
    options = {} if rule != "Adafactor" else dict(momentum=0.9)
    side_by_side(rule, gradients(2, shapes=shapes), shapes=shapes, **options)


def test_the_engine_is_told() -> None:
    named = parameters()
    optimizer = thalweg.torch.LAMB(named)
    assert optimizer.engine == "auto"
    train(optimizer, named, gradients(1))
    assert optimizer.engine == "fused"
