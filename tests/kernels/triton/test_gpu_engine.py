"""The GPU engine in the torch front end: what it serves, and what it leaves alone.

What users rely on is in test_gpu_checks.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import FUSED_RULES
from lanes import by_turns, once
from on_device import DEVICE, FEW, SHAPES, agree, gradients, make, parameters, side_by_side, train

import thalweg.torch
from thalweg.errors import NonFiniteError, OptionError, ResumeWarning
from thalweg.kernels import triton as kernels

pytestmark = pytest.mark.slow  # programs are interpreted

every_rule = pytest.mark.parametrize("rule", FUSED_RULES)
every_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
FACTORED: dict[str, Any] = dict(min_dim_size_to_factor=2, momentum=0.9)


def options_of(rule: str) -> dict[str, Any]:
    return FACTORED if rule == "Adafactor" else dict(weight_decay=0.1)


def lenient(p: Any) -> Any:
    p.grad_dtype = None  # of newer versions of torch, which else refuse gradients of another dtype
    return p


STACKED = {"a": (3, 8, 10), "b": (2, 5), "c": (4, 6, 7, 3)}
TINY = {f"t{i}": (1 + i % 3,) for i in range(5_000 if DEVICE == "cuda" else 60)}
#: Under a description: dtypes of parameters and gradients, shapes, and what is asked for.
ROWS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "stacked slices": ("float32", "float32", STACKED, dict(stacked_axes=1)),
    "rounded by chance": ("bfloat16", "bfloat16", SHAPES, dict(rounding="stochastic", seed=5)),
    "float16 by chance": ("float16", "float16", SHAPES, dict(rounding="stochastic", seed=5)),
    "narrow gradients": ("float32", "bfloat16", SHAPES, dict(prepare=lenient)),
    "wide gradients": ("bfloat16", "float32", SHAPES, dict(prepare=lenient)),
    "state in bfloat16": ("float32", "float32", SHAPES, dict(state_dtype="bfloat16")),
    "state in float16": ("float32", "float32", SHAPES, dict(state_dtype="float16")),
    "momentum in bfloat16": ("float32", "float32", SHAPES, dict(momentum_dtype="bfloat16")),
    "overrides": (
        *("float32", "float32", SHAPES),
        dict(overrides=[("vector", dict(weight_decay=0.0, lr_scale=0.5)), ("c*", dict(weight_decay=0.3))]),
    ),
    "many tiny tensors": ("float32", "float32", TINY, {}),
}


@once(0)
@every_rule
@pytest.mark.parametrize("row", ROWS)
def test_numbers_are_those_of_the_rule(rule: str, row: str) -> None:
    dtype, of_gradients, shapes, options = ROWS[row]
    given = {**options_of(rule), "weight_decay": 0.1, **options}
    side_by_side(rule, gradients(3, of_gradients, shapes), dtype, shapes, **given, lockstep=True)


@pytest.mark.nightly
@every_rule
@every_dtype
def test_a_step_that_is_not_finite_is_skipped(rule: str, dtype: str) -> None:
    steps = gradients(4, dtype)
    steps[1]["matrix"][3, 4] = float("nan")
    steps[2]["vector"][5] = float("inf")
    fused, _ = side_by_side(rule, steps, dtype, **options_of(rule), on_nonfinite="skip", lockstep=True)
    assert fused.skipped == 2
    assert fused.nonfinite() == ["vector"]


@once(2)
@every_rule
def test_a_step_like_the_last_is_not_sorted_again(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, steps = parameters(shapes=FEW), gradients(4, shapes=FEW)
    optimizer = make(rule, named, "auto", **options_of(rule))
    train(optimizer, named, steps[:1])
    assert optimizer.engine == "fused"

    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("sorted again")

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._sorter, "sort", forbidden)
        train(optimizer, named, steps[1:3])
        optimizer.param_groups[0]["maximize"] = True
        with pytest.raises(AssertionError, match="sorted again"):
            train(optimizer, named, steps[3:])
    train(optimizer, named, steps[3:])
    theirs = parameters(shapes=FEW)
    reference = make(rule, theirs, "reference", **options_of(rule))
    train(reference, theirs, steps[:3])
    reference.param_groups[0]["maximize"] = True
    train(reference, theirs, steps[3:])
    agree(optimizer, named, reference, theirs)


@once(2)
@every_rule
def test_what_overflows_when_it_is_stored_is_left_alone(rule: str) -> None:
    """Parameters of float16 beside its largest number: one of them would be infinite after a step."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters("float16", {"edge": (4, 6), "inside": (4, 6)})
        with torch.no_grad():
            named[0][1].fill_(-65000.0)
        optimizer = make(rule, named, engine, **{**options_of(rule), "lr": 1e4}, on_nonfinite="skip")
        (step,) = gradients(1, "float16", {"edge": (4, 6), "inside": (4, 6)})
        step["edge"].abs_()
        before = named[0][1].detach().clone()
        train(optimizer, named, [step])
        assert torch.equal(named[0][1], before)
        assert float(optimizer.state[named[0][1]]["step"]) == 0
        results += [optimizer, named]
    agree(*results)


@once(0)
@every_rule
def test_a_step_that_is_not_finite_raises_before_anything_is_written(rule: str) -> None:
    named, steps = parameters(), gradients(2)
    optimizer = make(rule, named, **options_of(rule), on_nonfinite="raise")
    train(optimizer, named, steps[:1])
    before = [(p.detach().clone(), {k: e.clone() for k, e in optimizer.state[p].items()}) for _, p in named]
    steps[1]["conv"][0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="'conv'"):
        train(optimizer, named, steps[1:])
    for (_, p), (old, state) in zip(named, before, strict=True):
        assert torch.equal(p, old)
        assert all(torch.equal(optimizer.state[p][key], entry) for key, entry in state.items())


@by_turns("found")
@every_rule
@pytest.mark.parametrize("found", [0.0, 1.0])
def test_what_a_grad_scaler_leaves_with_the_optimizer(rule: str, found: float) -> None:
    """Gradients are divided by the scale, and nothing is changed where one was not finite."""
    (step,) = gradients(1)
    theirs = parameters()
    reference = make(rule, theirs, "reference", **options_of(rule))
    train(reference, theirs, [step])

    named = parameters()
    optimizer = make(rule, named, **options_of(rule))
    optimizer.make_state()
    before = [p.detach().clone() for _, p in named]
    optimizer.grad_scale = torch.tensor(1024.0, device=DEVICE)
    optimizer.found_inf = torch.tensor(found, device=DEVICE)
    train(optimizer, named, [{name: g * 1024 for name, g in step.items()}])
    del optimizer.grad_scale, optimizer.found_inf
    if found:
        assert all(torch.equal(p, old) for (_, p), old in zip(named, before, strict=True))
        assert all(float(optimizer.state[p]["step"]) == 0 for _, p in named)
    else:
        agree(optimizer, named, reference, theirs)


@pytest.mark.nightly
@every_rule
def test_a_grad_scaler_finds_what_it_needs(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It checks gradients itself, and leaves scale and verdict to a step that says it can do with them."""
    monkeypatch.setattr(thalweg.torch.Optimizer, "_step_supports_amp_scaling", True)
    shapes = {"w": (6, 4), "b": (5,)}
    named, theirs = parameters(shapes=shapes), parameters(shapes=shapes)
    optimizer = make(rule, named, **options_of(rule))
    reference = make(rule, theirs, "reference", **options_of(rule))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=100)
    for value in (0.5, float("inf"), 0.25):
        optimizer.zero_grad()
        scaler.scale(sum((p * value).sum() for _, p in named)).backward()
        scaler.step(optimizer)
        scaler.update()
        if value < 1:
            train(reference, theirs, [{name: torch.full_like(p, value) for name, p in theirs}])
    assert scaler.get_scale() == 512
    agree(optimizer, named, reference, theirs)


@pytest.mark.nightly
@every_rule
def test_state_goes_from_engine_to_engine(rule: str) -> None:
    steps = gradients(4, shapes=FEW)
    named, theirs = parameters(shapes=FEW), parameters(shapes=FEW)
    fused, reference = make(rule, named, **options_of(rule)), make(rule, theirs, "reference", **options_of(rule))
    train(fused, named, steps[:2])
    train(reference, theirs, steps[:2])
    crossed = parameters(shapes=FEW)
    with torch.no_grad():
        for (_, p), (_, q) in zip(crossed, theirs, strict=True):
            p.copy_(q)
    other = make(rule, crossed, **options_of(rule))
    with pytest.warns(ResumeWarning, match="saved with engine='reference'"):
        other.load_state_dict(reference.state_dict())
    train(other, crossed, steps[2:])
    train(reference, theirs, steps[2:])
    agree(other, crossed, reference, theirs)


def test_float64_is_stepped_otherwise() -> None:
    named = [("w", torch.nn.Parameter(torch.ones(3, dtype=torch.float64, device=DEVICE)))]
    optimizer = thalweg.torch.LAMB(named, lr=0.1)
    named[0][1].grad = torch.ones_like(named[0][1])
    optimizer.step()
    assert optimizer.engine == "reference"
    strict = thalweg.torch.LAMB(named, lr=0.1, engine="fused")
    with pytest.raises(OptionError, match=r"cannot run for parameter 'w': there is no fused kernel for float64"):
        strict.step()


def test_without_triton_lists_serve_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from thalweg.torch.engines import choice

    monkeypatch.setattr(kernels, "reason_missing", lambda: "Triton is not installed")
    choice.reason_missing.cache_clear()
    kernels.warn_once.cache_clear()
    named = parameters()
    try:
        optimizer = make("LAMB", named, "auto")
        with pytest.warns(thalweg.errors.FallbackWarning, match="fused GPU kernels are not available") as caught:
            train(optimizer, named, gradients(1))
        assert len(caught) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(optimizer, named, gradients(1))
        assert optimizer.engine == "foreach"
    finally:
        choice.reason_missing.cache_clear()
        kernels.warn_once.cache_clear()


@once(2)
@every_rule
def test_one_parameter_after_the_other(rule: str) -> None:
    """As in a backward pass: tables of all of them are kept."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters()
        optimizer = make(rule, named, engine, **options_of(rule))
        for step in gradients(2):
            for name, p in named:
                p.grad = step[name]
                optimizer.step_parameter(p)
        if engine == "fused":
            assert len(optimizer._steps_of_some) == len(named)
        results += [optimizer, named]
    agree(*results)


@pytest.mark.nightly
def test_tables_of_old_lists_are_dropped() -> None:
    named, (step,) = parameters(), gradients(1)
    optimizer = make("LARS", named)
    for count in range(40):
        chosen = [name for i, (name, _) in enumerate(named) if count >> i & 1]
        train(optimizer, named, [{name: step[name] for name in chosen}])
    assert len(optimizer._steps) <= 8


def test_an_empty_model_and_empty_tensors() -> None:
    shapes = {"none": (0,), "nothing": (3, 0, 2)}
    named = parameters(shapes=shapes)
    optimizer = make("LAMB", named)
    train(optimizer, named, gradients(2, shapes=shapes))
    assert all(float(optimizer.state[p]["step"]) == 2 for _, p in named)


@by_turns("options")
@pytest.mark.parametrize("options", [FACTORED, dict(factored=False)], ids=["factored", "all squares"])
@pytest.mark.parametrize("rates", [(0.3, None, 0.2), (None, 0.5, 0.0)], ids=str)
def test_adafactor_whose_lr_is_taken_away(options: dict[str, Any], rates: Any) -> None:
    """Then the step size follows from the step; where there never was one, a rate scales it."""
    results = []
    for engine in ("fused", "reference"):
        named = parameters(shapes=FEW)
        optimizer = make("Adafactor", named, engine, lr=rates[0], **options)
        for t, (lr, step) in enumerate(zip(rates, gradients(3, shapes=FEW), strict=True)):
            if t:
                optimizer.param_groups[0]["lr"] = lr
            train(optimizer, named, [step])
        results += [optimizer, named]
    agree(*results)
