"""The same bits, whatever the number of threads, the width of vectors, the order and the company."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import FRONT_END, Arrays, bits, copies
from side_by_side import DTYPES, every_dtype, every_rule, kind, made, needs_core

from thalweg.kernels.cpu.library import is_here, levels, load
from thalweg.kernels.threads import set_num_threads

pytestmark = needs_core

#: Below and above what one thread steps alone, cut into one task and several, factored and not.
SHAPES = {
    **{str(size): (size,) for size in (1, 7, 15, 17, 63, 65, 1025, 16385, 65536, 65537)},
    "number": (),
    "matrix": (300, 250),
    "small matrix": (33, 40),
    "tall": (20_000, 5),
    "wide": (5, 20_000),
    "conv": (33, 34, 3, 3),
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
    "by chance": dict(rounding="stochastic"),
}
LEVELS = [] if not is_here() else levels(load())


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


@every_rule
@every_dtype
@pytest.mark.parametrize("mode", MODES)
def test_for_any_number_of_threads_and_vectors_of_any_width(rule: str, dtype: str, mode: str) -> None:
    """Run after run; a machine that has only narrower vectors gives the same."""
    params, grads = draw(SHAPES, dtype), draw_gradients(SHAPES, dtype, 2)
    results = []
    for level, threads in [*itertools.product(range(len(LEVELS)), (1, 3)), (0, 2), (0, 7), (0, 1)]:
        assert load().thalweg_choose_level(level)
        set_num_threads(threads)
        results.append(trained(rule, params, grads, **MODES[mode]))
    assert all(result == results[0] for result in results)


def test_noise_for_any_number_of_threads_and_vectors_of_any_width() -> None:
    """Nothing else of Kron's step over a vector is made by native code alone."""
    params, (step,) = draw({"v": (100_003,)}, "float32"), draw_gradients({"v": (100_003,)}, "float32", 1)
    results = []
    for level, threads in itertools.product(range(len(LEVELS)), (1, 2, 7)):
        assert load().thalweg_choose_level(level)
        set_num_threads(threads)
        optimizer, arrays = FRONT_END["Kron"](0.1, damping=0.5, engine="fused"), copies(params)
        optimizer.step(arrays, step)
        results.append((bits(arrays), bits(optimizer.state)))
    assert all(result == results[0] != bits(params) for result in results)


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
@pytest.mark.parametrize("mode", ["propagate", "skip", "narrow state"])
def test_one_by_one_or_the_whole_model_in_any_order(rule: str, mode: str) -> None:
    """Small tensors alone or among large ones; and what a guard has looked at before it is written is the same."""
    set_num_threads(2)
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    expected = trained(rule, params, grads, **MODES[mode])
    names = list(params)
    np.random.default_rng(0).shuffle(names)
    assert trained(rule, {name: params[name] for name in names}, grads, **MODES[mode]) == expected
    if mode == "propagate":
        assert trained(rule, params, grads, on_nonfinite="skip") == expected
        assert trained(rule, params, grads, on_nonfinite="raise") == expected
    single = made(rule, "fused", **OPTIONS[rule], **MODES[mode])
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
