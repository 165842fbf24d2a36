"""Gradients that are added up: a step with their mean at the last call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from raw_arrays import bfloat16
from spiked import draw
from tolerances import FLOAT64

import thalweg.numpy
from thalweg import OptionError, StateError
from thalweg.numpy import SGD, AdamW

WANTED = 3


def means(steps: int) -> list[dict[str, Any]]:
    parts = [[draw(WANTED * step + i) for i in range(1, WANTED + 1)] for step in range(steps)]
    return [{name: np.mean([part[name] for part in own], axis=0) for name in own[0]} for own in parts]


def train(optimizer: Any, params: Any, grads: Any) -> Any:
    for own in grads:
        optimizer.step(params, own)
    return params


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("options", [{}, dict(max_grad_norm=0.5), dict(global_step=True)], ids=str)
def test_it_is_one_step_with_the_mean(engine: Any, options: Any) -> None:
    every = [draw(call) for call in range(1, 4 * WANTED + 1)]
    found = train(AdamW(lr=0.1, accumulate=WANTED, engine=engine, **options), draw(0), every)
    wanted = train(AdamW(lr=0.1, engine="reference", **options), draw(0), means(4))
    assert all(np.max(np.abs(p - wanted[name])) < FLOAT64 for name, p in found.items())


def test_bfloat16_is_added_up_in_float32() -> None:
    params = [np.zeros(4, bfloat16())]
    optimizer = SGD(lr=1.0, accumulate=256)
    for call in range(256):
        optimizer.step(params, [np.full(4, 1.0 if call == 0 else 2.0**-10, bfloat16())])
    assert np.array_equal(params[0], np.full(4, -(1 + 255 / 1024) / 256, bfloat16()))


def test_files_go_on_in_the_middle(tmp_path: Any) -> None:
    every = [draw(call) for call in range(1, 3 * WANTED + 1)]
    wanted = train(AdamW(lr=0.1, accumulate=WANTED), draw(0), every)
    first = AdamW(lr=0.1, accumulate=WANTED)
    params = train(first, draw(0), every[: WANTED + 2])
    first.save(tmp_path / "state.npz")
    second = AdamW(lr=0.1, accumulate=WANTED)
    second.load(tmp_path / "state.npz")
    train(second, params, every[WANTED + 2 :])
    assert all(np.array_equal(p, wanted[name]) for name, p in params.items())
    torch = pytest.importorskip("thalweg.torch")
    layer = pytest.importorskip("torch.nn").Linear(2, 2)
    with pytest.raises(StateError, match="gradients of 2 steps wait in this state"):
        torch.import_state(torch.AdamW(layer.parameters(), lr=0.1), first.state_dict())


def test_without_a_gradient_it_counts_as_zero_or_is_left_alone() -> None:
    params = {name: np.zeros(2) for name in "abc"}
    optimizer = SGD(lr=1.0, accumulate=2)
    optimizer.step(params, {"a": np.ones(2), "b": np.ones(2)})
    optimizer.step(params, {"a": np.ones(2)})
    assert [p[0] for p in params.values()] == [-1.0, -0.5, 0.0]


def test_a_mixture_accumulates_for_all() -> None:
    entries = [("a", thalweg.numpy.SGD.options(lr=0.1)), ("b", thalweg.numpy.AdamW.options(lr=0.1))]
    every = [draw(call) for call in range(1, 2 * WANTED + 1)]
    found = train(thalweg.numpy.Mixture(entries, accumulate=WANTED), draw(0), every)
    wanted = train(thalweg.numpy.Mixture(entries), draw(0), means(2))
    assert all(np.max(np.abs(p - wanted[name])) < FLOAT64 for name, p in found.items())


def test_what_is_refused() -> None:
    with pytest.raises(OptionError, match="accumulate counts steps of all parameters"):
        AdamW(lr=0.1, accumulate=2).update("a", np.ones(2), np.ones(2))
    with pytest.raises(OptionError, match="accumulate concerns the whole step"):
        AdamW(lr=0.1, overrides=[("a", dict(accumulate=2))])
