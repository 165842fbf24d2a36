"""Copies of an optimizer that steps by native code: its tables hold addresses, which are nobody else's business."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits, copies
from side_by_side import every_rule, made, needs_core

from thalweg.numpy import Optimizer

pytestmark = needs_core

SHAPES = {"number": (), "vector": (1030,), "matrix": (70, 40)}


COPIERS: dict[str, Callable[[Optimizer], Optimizer]] = {
    "copy()": lambda optimizer: optimizer.copy(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "with_options()": lambda optimizer: optimizer.with_options(),
    "state_dict": lambda optimizer: restored(optimizer),
}


def restored(optimizer: Optimizer) -> Optimizer:
    other = made(optimizer.rule.__name__, "fused")
    other.load_state_dict(optimizer.state_dict())
    return other


@every_rule
@pytest.mark.parametrize("copier", COPIERS.values(), ids=COPIERS)
def test_a_copy_goes_on_by_itself_on_the_same_arrays(rule: str, copier: Any) -> None:
    """Its original keeps its state, though parameters and gradients lie where they lay."""
    params, grads = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 4)
    optimizer, twin, twins = made(rule, "fused"), made(rule, "fused"), copies(params)
    gradient = copies(grads[0])
    for t, step in enumerate(grads):
        for name, g in step.items():
            gradient[name][...] = g
        if t == 2:
            original, before = optimizer, bits(optimizer.state)
            optimizer = copier(optimizer)
        optimizer.step(params, gradient)
        twin.step(twins, step)
    assert bits(params) == bits(twins)
    assert bits(optimizer.state) == bits(twin.state)
    assert bits(original.state) == before


@every_rule
@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_a_copy_holds_state_and_no_parameters_or_gradients(rule: str, engine: str) -> None:
    optimizer = made(rule, engine, **(dict(momentum=0.9) if rule == "Adafactor" else {}))
    optimizer.update("w", np.ones(100_000, "float32"), np.ones(100_000, "float32"))
    state = sum(entry.nbytes for entry in optimizer.state["w"].values())
    assert state < len(pickle.dumps(optimizer)) < state + 50_000


@every_rule
@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_gradients_are_let_go_after_a_step(rule: str, engine: str) -> None:
    """Whoever frees them after a step gets their memory back."""

    class Watched(np.ndarray):
        pass

    optimizer, weights = made(rule, engine), np.ones(1000, "float32")
    gradient = np.ones(1000, "float32").view(Watched)
    alive = weakref.ref(gradient)
    optimizer.update("w", weights, gradient[:])
    del gradient
    gc.collect()
    assert alive() is None
