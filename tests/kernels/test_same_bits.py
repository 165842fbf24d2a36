"""The same bits, whatever the number of threads, the width of vectors, the order and the company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lanes import by_turns
from raw_arrays import Arrays, bits, copies
from side_by_side import DTYPES, draw, draw_gradients, every_dtype, every_rule, kind, made, needs_core

from thalweg.kernels.cpu.library import levels, load, reason_missing
from thalweg.kernels.threads import set_num_threads

pytestmark = needs_core

#: Below and above what one thread steps alone, cut into one task and several, factored and not.
SHAPES = {
    "number": (),
    "small": (1000,),
    "alone": (65536,),
    "together": (65537,),
    "large": (200_003,),
    "matrix": (300, 250),
    "small matrix": (33, 40),
    "tall": (20_000, 5),
    "wide": (5, 20_000),
    "conv": (64, 130, 3, 3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "LARS": dict(weight_decay=0.1),
    "LAMB": dict(weight_decay=0.1),
    "Adafactor": dict(weight_decay=0.1, min_dim_size_to_factor=2, momentum=0.9),
}
#: Among them: one pass, two and three; state that is written while it is measured, and state that is not.
MODES: dict[str, dict[str, Any]] = {
    "propagate": {},
    "skip": dict(on_nonfinite="skip"),
    "narrow state": dict(state_dtype="float16"),
    "norm": dict(max_grad_norm=1.0),
}
LEVELS = [] if reason_missing() is not None else levels(load())


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    set_num_threads(None)
    if LEVELS:
        load().thalweg_choose_level(-1)


def trained(rule: str, params: Arrays, grads: list[Arrays], **options: Any) -> Any:
    """All bits after some steps: parameters, state and figures."""
    optimizer, arrays = made(rule, "fused", **{**OPTIONS[rule], **options}), copies(params)
    for step in grads:
        optimizer.step(arrays, step)
    assert bits(arrays) != bits(params)
    return {name: (bits(arrays[name]), bits(optimizer.state[name]), bits(optimizer.stats()[name])) for name in arrays}


@pytest.mark.nightly
@by_turns()
@every_rule
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_for_any_number_of_threads(rule: str, mode: dict, dtype: str) -> None:
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 2)
    results = []
    for threads in (1, 2, 3, 7, 2, 1):
        set_num_threads(threads)
        results.append(trained(rule, params, grads, **mode))
    assert all(result == results[0] for result in results[1:])


@by_turns()
@every_rule
@every_dtype
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_for_vectors_of_any_width(rule: str, dtype: str, mode: dict) -> None:
    """A machine that has only narrower ones gives the same."""
    shapes = {**{str(n): (n,) for n in (1, 7, 15, 17, 63, 65, 1025, 16385)}, "matrix": (65, 70), "conv": (33, 34, 3, 3)}
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 2)
    results = []
    for level in range(len(LEVELS)):
        assert load().thalweg_choose_level(level)
        results.append(trained(rule, params, grads, **mode))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("scale", [1.0, 1e18])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_a_pass_has_kept_is_what_the_next_would_compute(dtype: str, scale: float) -> None:
    """LAMB's update is kept for small tensors alone, and never under a guard. scale: of parameters; sums overflow."""
    shapes = {str(n): (n,) for n in (1, 17, 2047, 2049, 16384, 16385)}
    params, grads = draw(shapes, dtype, scale=scale), draw_gradients(shapes, dtype, 3)
    kept, computed = (trained("LAMB", params, grads, exempt=None, on_nonfinite=on) for on in ("propagate", "skip"))
    assert kept == computed


@by_turns()
@every_rule
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stochastic_rounding_for_vectors_of_any_width_and_any_number_of_threads(rule: str, dtype: str) -> None:
    shapes = {"vector": (70_001,), "matrix": (300, 250), "small": (17, 19)}
    params, grads = draw(shapes, dtype), draw_gradients(shapes, dtype, 2)
    results = []
    for level, threads in itertools.product(range(len(LEVELS)), (1, 3)):
        assert load().thalweg_choose_level(level)
        set_num_threads(threads)
        results.append(trained(rule, params, grads, rounding="stochastic"))
    assert all(result == results[0] for result in results)


def test_a_width_that_the_machine_does_not_have_is_refused() -> None:
    assert not load().thalweg_choose_level(len(LEVELS))
    assert not load().thalweg_choose_level(-2)
    assert load().thalweg_choose_level(-1)


@every_rule
def test_special_numbers_for_vectors_of_any_width(rule: str) -> None:
    """Infinities, NaN, the largest and the smallest; which NaN it is does not matter."""
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 3e38, -3e38, 1e-45, 1e-38, 1e19, 1e-23, 1.0], "float32")
    results = []
    for level in range(len(LEVELS)):
        assert load().thalweg_choose_level(level)
        for value in special:
            optimizer, weights = made(rule, "fused", **OPTIONS[rule]), np.resize(special, (24, 11)).copy()
            optimizer.update("w", weights, np.full((24, 11), value, "float32"))
            entries = [weights, *optimizer.state["w"].values()]
            results.append([bits(np.where(np.isnan(x), 0, x)) for x in entries])
    count = len(special)
    assert all(result == results[i % count] for i, result in enumerate(results))


@every_rule
def test_run_after_run(rule: str) -> None:
    set_num_threads(3)
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    first = trained(rule, params, grads)
    assert all(trained(rule, params, grads) == first for _ in range(3))


@every_rule
def test_in_any_order_of_the_parameters(rule: str) -> None:
    set_num_threads(2)
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    names = list(params)
    expected = trained(rule, params, grads)
    for seed in range(3):
        np.random.default_rng(seed).shuffle(names)
        assert trained(rule, {name: params[name] for name in names}, grads) == expected


@by_turns()
@every_rule
@pytest.mark.parametrize("mode", ["propagate", "skip", "narrow state"])
def test_one_by_one_or_the_whole_model(rule: str, mode: str) -> None:
    """Small tensors alone or among large ones."""
    set_num_threads(2)
    options = {**OPTIONS[rule], **MODES[mode]}
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    expected = trained(rule, params, grads, **MODES[mode])
    single = made(rule, "fused", **options)
    for step in grads:
        for name, weights in params.items():
            single.update(name, weights, step[name], shape=weights.shape)
    for name in params:
        assert (bits(params[name]), bits(single.state[name]), bits(single.stats()[name])) == expected[name]


@every_rule
def test_among_others_of_other_dtypes(rule: str) -> None:
    set_num_threads(2)
    shapes = {"small": (1000,), "large": (70_000,), "matrix": (300, 250)}
    models = {dtype: draw(shapes, dtype) for dtype in DTYPES if kind(dtype)}
    grads = {dtype: draw_gradients(shapes, dtype, 2) for dtype in models}
    mixed = {f"{dtype} {name}": p for dtype, model in models.items() for name, p in model.items()}
    steps = [{f"{d} {name}": g for d in models for name, g in grads[d][t].items()} for t in range(2)]
    together = trained(rule, mixed, steps)
    for dtype, model in models.items():
        alone = trained(rule, model, grads[dtype])
        assert {name: together[f"{dtype} {name}"] for name in model} == alone


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_being_watched_changes_nothing(rule: str, policy: str) -> None:
    """A guard looks before anything is written; what is written is the same."""
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    assert trained(rule, params, grads, on_nonfinite=policy) == trained(rule, params, grads)
