"""One optimizer and several threads; options that change between steps; numbers at the edge of the guard."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import thalweg
from thalweg import NonFiniteError, OptionError
from thalweg.kernels.cpu.library import reason_missing
from thalweg.numpy import LAMB, LARS, Adafactor

pytestmark = pytest.mark.skipif(reason_missing() is not None, reason="there is no native library")


def test_threads_that_step_parameters_of_one_optimizer() -> None:
    """Each steps its own arrays, as often as it says."""
    optimizer = LARS(lr=0.5, trust=False, momentum=0.0, engine="fused")
    arrays = [np.zeros(3000 + i, np.float32) for i in range(4)]

    def work(index: int) -> None:
        gradient = np.ones_like(arrays[index])
        for _ in range(200):
            optimizer.update(index, arrays[index], gradient)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(x, np.full_like(x, -100)) for x in arrays)


@pytest.mark.parametrize("engine", ["reference", "fused"])
@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_ratio_that_float32_cannot_hold(engine: str, policy: str) -> None:
    weights = np.full(4, 1000, np.float32)
    optimizer = LAMB(lr=1.0, on_nonfinite=policy, engine=engine)
    try:
        optimizer.update("w", weights, np.full(4, 1e-42, np.float32))
    except NonFiniteError:
        assert policy == "raise"
    assert (weights == 1000).all()


@pytest.mark.parametrize("engine", ["reference", "fused"])
def test_state_is_kept_as_changed_options_have_it(engine: str) -> None:
    weights, gradient = np.ones((4, 4), np.float32), np.full((4, 4), 0.1, np.float32)
    optimizer = Adafactor(lr=0.1, momentum=0.9, engine=engine)
    optimizer.update("w", weights, gradient)
    changed = optimizer.with_state_dtype("float16")
    changed.update("w", weights, gradient)
    kinds = {key: entry.dtype.name for key, entry in changed.state["w"].items() if key != "step"}
    assert set(kinds.values()) == {"float16"}


def test_a_schedule_that_gives_an_array_is_refused() -> None:
    optimizer = LARS(lr=lambda t: 0.1 if t == 1 else np.ones(2))
    weights, gradient = np.ones(3), np.ones(3)
    optimizer.update("w", weights, gradient)
    with pytest.raises(OptionError, match="lr must be a finite number"):
        optimizer.update("w", weights, gradient)


def test_more_threads_than_any_machine_has() -> None:
    thalweg.set_num_threads(2**40)
    try:
        weights = np.ones(10, np.float32)
        LARS(lr=0.1).update("w", weights, np.ones_like(weights))
    finally:
        thalweg.set_num_threads(None)
    assert (weights < 1).all()
