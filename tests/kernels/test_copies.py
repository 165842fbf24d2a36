"""What an optimizer that steps by native code holds beside its state: nothing of the caller's.

tests/numpy/test_every_option.py has that copies go on by themselves.
"""

from __future__ import annotations

import gc
import pickle
import weakref

import numpy as np
import pytest
from side_by_side import every_rule, made, needs_core

pytestmark = needs_core


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
