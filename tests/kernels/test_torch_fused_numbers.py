"""torch tensors stepped by native code: the numbers of the reference engine."""

from __future__ import annotations

from typing import Any

import pytest
from cases import FUSED_RULES, Case
from lanes import by_turns
from side_by_side import every_dtype, every_rule, needs_core

torch = pytest.importorskip("torch")

from side_by_side_torch import FULL, SHAPES, agree, gradients, make, parameters, side_by_side, train  # noqa: E402

import thalweg.torch  # noqa: E402
from thalweg.kernels.threads import set_num_threads  # noqa: E402

pytestmark = needs_core

TABLE = [
    pytest.param(case, options, id=f"{case.name}-{description}")
    for case in FUSED_RULES.values()
    for description, options in case.options.items()
]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "options"), TABLE)
def test_it_equals_the_reference(case: Case, options: dict) -> None:
    side_by_side(case.name, gradients(3, "float64"), "float64", **options)
    side_by_side(case.name, gradients(3), **options)


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_in_sixteen_bits(rule: str, dtype: str, rounding: str) -> None:
    side_by_side(rule, gradients(1, dtype), dtype, rounding=rounding, **FULL[rule])


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(
    "options",
    [
        dict(maximize=True),
        dict(max_grad_norm=0.5),
        dict(on_nonfinite="skip"),
        dict(on_nonfinite="raise"),
        dict(max_grad_norm=0.5, on_nonfinite="skip"),
        dict(stacked_axes=1),
    ],
    ids=str,
)
def test_around_the_rule(rule: str, dtype: str, options: dict) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if len(shape) > 1 or "stacked_axes" not in options}
    side_by_side(rule, gradients(3, dtype, shapes), dtype, shapes, weight_decay=0.1, **options, **FULL[rule])


@by_turns()
@every_rule
@pytest.mark.parametrize("axes", [1, 2])
def test_stacks_of_single_numbers(rule: str, axes: int) -> None:
    """Each is a tensor by itself, as in numpy."""
    shapes = {"numbers": (5, 6)[:axes]}
    side_by_side(rule, gradients(2, "float64", shapes), "float64", shapes, stacked_axes=axes)


@every_rule
def test_two_stacked_axes(rule: str) -> None:
    shapes = {"matrices": (2, 3, 5, 6), "vectors": (3, 2, 7)}
    side_by_side(rule, gradients(2, "float64", shapes), "float64", shapes, stacked_axes=2, **FULL[rule])


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_state_of_other_dtypes(rule: str, dtype: str, stored: str) -> None:
    """One step: from then on, roundings add up."""
    side_by_side(rule, gradients(1, dtype), dtype, state_dtype=stored, **FULL[rule])
    side_by_side(rule, gradients(1, dtype), dtype, momentum_dtype=stored, **FULL[rule])


@every_rule
def test_large_tensors_on_several_threads(rule: str) -> None:
    shapes = {"vector": (200_003,), "matrix": (300, 250), "small": (7,), "conv": (64, 32, 3, 3)}
    for threads in (1, 2, 3):
        set_num_threads(threads)
        try:
            side_by_side(rule, gradients(2, shapes=shapes), shapes=shapes, **FULL[rule])
        finally:
            set_num_threads(None)


@every_rule
def test_bits_do_not_depend_on_the_number_of_threads(rule: str) -> None:
    shapes = {"vector": (200_003,), "matrix": (300, 250), "small": (7,)}
    results = []
    for threads in (1, 2, 3, 7):
        set_num_threads(threads)
        try:
            named = parameters(shapes=shapes)
            train(make(rule, named, **FULL[rule]), named, gradients(2, shapes=shapes))
        finally:
            set_num_threads(None)
        results.append([p.detach() for _, p in named])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_numpy_and_torch_give_the_same_bits(rule: str, dtype: str) -> None:
    """It is the same code over the same numbers."""
    import thalweg.numpy

    named, steps = parameters(dtype), gradients(3, dtype)
    train(make(rule, named, **FULL[rule]), named, steps)
    arrays = {name: p.detach().numpy().copy() for name, p in parameters(dtype)}
    optimizer = getattr(thalweg.numpy, rule)(lr=FUSED_RULES[rule].lr, engine="fused", **FULL[rule])
    for step in steps:
        optimizer.step(arrays, {name: g.numpy() for name, g in step.items()})
    assert all((arrays[name] == p.detach().numpy()).all() for name, p in named)


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
def test_a_scheduler_of_torch(rule: str) -> None:
    both = []
    for engine in ("fused", "reference"):
        named = parameters("float64")
        optimizer = make(rule, named, engine, **FULL[rule])
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step in gradients(4, "float64"):
            train(optimizer, named, [step])
            scheduler.step()
        both.append((optimizer, named))
    agree(*both[0], *both[1])


@every_rule
def test_models_of_mixed_dtypes(rule: str) -> None:
    """All of them in one call, and gradients of another dtype than their parameter."""
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
