"""What all gradients of a step decide together: clipping, spikes, and what a GradScaler leaves to the step."""

from __future__ import annotations

import copy
import gc
import re
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from spiked import KINDS, STEPS, draw
from tolerances import FLOAT64

import thalweg.numpy
import thalweg.torch
from thalweg import Spikes
from thalweg.check.problem import give, train, weights
from thalweg.check.state import through_a_file

ENGINES = pytest.mark.parametrize("engine", ["auto", "foreach", "reference"])
SHAPES = [(4, 3), (5,), (0, 3)]
DOUBLE = torch.float64


def assert_near(first: Any, second: Any) -> None:
    for p, q in zip(first, second, strict=True):
        torch.testing.assert_close(p, q, rtol=FLOAT64, atol=FLOAT64)


@ENGINES
@pytest.mark.parametrize(
    "options",
    [{}, dict(max_grad_norm=0.05), dict(on_nonfinite="skip"), dict(spikes=Spikes(window=2, quantile=0.5))],
    ids=str,
)
def test_a_scaler_leaves_scale_and_infinities_to_the_step(options: dict[str, Any], engine: str) -> None:
    """Norms are those of gradients without the scale; a step that it has found infinite changes and counts nothing."""
    params, others = weights(SHAPES, DOUBLE), weights(SHAPES, DOUBLE)
    scaled, plain = (thalweg.torch.LAMB(each, lr=0.1, engine=engine, **options) for each in (params, others))
    for t, overflows in enumerate((False, False, True, False, False)):
        give(params, t, size=102.4)
        params[0].grad[0, 0] *= float("inf") if overflows else 1.0
        scaled.grad_scale, scaled.found_inf = torch.tensor(1024.0), torch.tensor(float(overflows))
        scaled.step()
        if not overflows:
            train(plain, others, 1, first=t)
        assert_near(params, others)
        assert [int(state["step"]) for state in scaled.state.values()] == [
            int(state["step"]) for state in plain.state.values()
        ]


@ENGINES
def test_a_norm_within_its_limit_changes_no_bit(engine: str) -> None:
    """One above: tests/engines."""
    ends = []
    for limit in (None, 1e3):
        ends.append(weights(SHAPES, DOUBLE))
        train(thalweg.torch.SGD(ends[-1], lr=0.1, momentum=0.9, max_grad_norm=limit, engine=engine), ends[-1], 3)
    assert all(map(torch.equal, *ends))


@ENGINES
@pytest.mark.parametrize("rule", ["LAMB", "Muon", "Kron"])
def test_loading_leaves_nothing_of_before(rule: str, engine: str) -> None:
    """Neither statistics nor the memory of its state."""
    (p,) = weights(SHAPES[:1])
    optimizer = getattr(thalweg.torch, rule)([p], lr=0.1, engine=engine)
    train(optimizer, [p], 3)
    before = [weakref.ref(entry) for entry in optimizer.state[p].values()]
    saved = optimizer.state_dict()
    saved["state"] = {0: {key: entry.clone() for key, entry in saved["state"][0].items()}}
    optimizer.load_state_dict(saved)
    gc.collect()
    assert optimizer.stats() == {}
    assert [entry() for entry in before] == [None] * len(before)


# ---- spikes


def name_params() -> list[tuple[str, Any]]:
    return [(name, torch.nn.Parameter(torch.from_numpy(p))) for name, p in draw(0).items()]


def train_named(optimizer: Any, named: Any, steps: range = range(1, STEPS + 1)) -> None:
    for t in steps:
        for name, p in named:
            p.grad = torch.from_numpy(draw(t)[name]).to(p.dtype)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("version", ["this", "0.2"])
def test_checkpoints_and_copies_go_on_in_the_middle(version: str) -> None:
    named = name_params()
    optimizer = thalweg.torch.AdamW(named, lr=0.1, spikes=KINDS["skip"])
    train_named(optimizer, named, range(1, 8))
    others = [(name, torch.nn.Parameter(p.detach().clone())) for name, p in named]
    loaded = thalweg.torch.AdamW(others, lr=0.1)  # options come with the state
    saved = through_a_file(optimizer.state_dict(), weights_only=True)
    if version == "0.2":  # which said whose norm is judged, too
        saved["param_groups"][0]["spikes"] = (*saved["param_groups"][0]["spikes"], "gradient")
    loaded.load_state_dict(saved)
    copied = copy.deepcopy(optimizer)
    again = list(zip("ab", copied.parameters(), strict=True))
    for each, own in ((optimizer, named), (loaded, others), (copied, again)):
        train_named(each, own, range(8, STEPS))
    for others_params in (others, again):
        assert all(torch.equal(p, q) for (_, p), (_, q) in zip(named, others_params, strict=True))
    assert loaded.stats()["a"]["spikes"] == optimizer.skipped > 0


# ---- clipped before


@pytest.mark.parametrize(
    ("options", "dtype", "share", "reads", "is_told"),
    [
        ({}, torch.float32, 1.0, False, True),
        ({}, torch.bfloat16, 1.0, False, True),
        ({}, torch.float64, 1.0, False, True),
        # statistics wait for the device, and read norms that the host does not see otherwise
        ({}, torch.float32, 1.0, True, True),
        ({}, torch.float32, 0.5, False, False),
        (dict(max_grad_norm=1.0), torch.float32, 0.0, False, False),
    ],
)
def test_gradients_that_are_clipped_before_are_told_once(
    options: dict[str, Any], dtype: torch.dtype, share: float, reads: bool, is_told: bool
) -> None:
    """By norms around 2 that are clipped at 1 in a share of steps."""
    params = [torch.nn.Parameter(torch.ones(40, 10, dtype=dtype)) for _ in range(2)]
    optimizer = thalweg.torch.AdamW(params, lr=1e-3, spikes=Spikes(window=32), **options)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for t in range(100):
            give(params, t, size=0.04 * (1 + t % 7))
            if t % 10 < 10 * share:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            if reads:
                optimizer.stats()
    assert all(each.filename == __file__ for each in warned)
    told = [str(each.message) for each in warned]
    assert len(told) == is_told
    for words in told:
        assert re.search(r"of the last 32 norms of the gradient none was above (1|1\.00\d|0\.99\d*),", words)
        assert "by max_grad_norm=1 of the optimizer" in words


def test_numpy_tells_it_too() -> None:
    params, optimizer = {"w": np.ones(3)}, thalweg.numpy.SGD(lr=0.1, spikes=Spikes(window=16))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(60):
            optimizer.step(params, {"w": np.array([0.0, 2.0, 0.0])})
    (warning,) = told
    assert "of the last 16 norms of the gradient none was above 2, and 16 were equal" in str(warning.message)
    assert warning.filename == __file__
