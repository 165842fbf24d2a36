"""Where arrays lie: at any address, in larger buffers that stay untouched, on top of one another; and who keeps them.

tests/numpy/test_whole_model.py has gradients in the memory of other parameters, test_every_option.py copies that go on.
"""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from agree import draw, draw_gradients
from raw_arrays import bits
from side_by_side import Both, every_dtype, every_rule, made, needs_core

from thalweg.kernels.threads import set_num_threads

pytestmark = needs_core

FULL: dict[str, dict[str, Any]] = {"LARS": {}, "LAMB": {}, "Adafactor": dict(momentum=0.9, min_dim_size_to_factor=2)}
#: The last is cut into tasks of several threads.
SHAPES = [(1,), (17,), (1025,), (40, 33), (5, 2100), (12, 3, 11), (65_537,)]
CANARY = 0xA5


class Guarded:
    """An array at an odd address, in a buffer that begins and ends with bytes that nobody may change."""

    def __init__(self, x: Any, offset: int) -> None:
        self.edge = 128 + offset
        self.buffer = bytearray([CANARY]) * (2 * self.edge + x.nbytes)
        self.x = np.frombuffer(self.buffer, np.uint8, x.nbytes, self.edge).view(x.dtype).reshape(x.shape)
        self.x[...] = x

    @property
    def untouched(self) -> bool:
        end = len(self.buffer) - self.edge
        return set(self.buffer[: self.edge]) == {CANARY} == set(self.buffer[end:])


@every_rule
@every_dtype
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 6])
def test_any_address_gives_the_same_bits_and_nothing_around_is_touched(rule: str, dtype: str, offset: int) -> None:
    given = {str(shape): shape for shape in SHAPES}
    params, grads = draw(given, dtype), draw_gradients(given, dtype, 3)
    guarded = {name: Guarded(p, offset) for name, p in params.items()}
    moved, aligned = made(rule, "fused", **FULL[rule]), made(rule, "fused", **FULL[rule])
    set_num_threads(3)
    for t, step in enumerate(grads):
        gradients = {name: Guarded(g, offset + t) for name, g in step.items()}
        moved.step({name: p.x for name, p in guarded.items()}, {name: g.x for name, g in gradients.items()})
        aligned.step(params, step)
        assert moved.engine == "fused"
        assert all(one.untouched for one in (*guarded.values(), *gradients.values()))
        assert bits({name: g.x for name, g in gradients.items()}) == bits(step), "gradients are read, never written"
    set_num_threads(None)
    assert bits({name: p.x for name, p in guarded.items()}) == bits(params)
    assert bits(moved.state) == bits(aligned.state)


@every_rule
@every_dtype
@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_a_gradient_that_is_the_parameter_itself(rule: str, dtype: str, policy: str) -> None:
    for shape in ((70,), (1500,), (40, 33), (300, 250)):
        params = draw({"w": shape}, dtype)
        weights, twin = params["w"].copy(), params["w"].copy()
        optimizer, other = (made(rule, "fused", **FULL[rule], on_nonfinite=policy) for _ in range(2))
        for _ in range(2):
            optimizer.update("w", weights, weights)
            other.update("w", twin, twin.copy())
        assert optimizer.engine == "fused"
        assert bits(weights) == bits(twin) != bits(params["w"])
        assert bits(optimizer.state) == bits(other.state)


@every_rule
@pytest.mark.parametrize("shift", [-700, -33, -1, 1, 2, 31, 32, 64, 700, 1499])
def test_a_gradient_that_overlaps_its_parameter_in_part(rule: str, shift: int) -> None:
    """What is read is what was there before."""
    results = []
    for overlapping in (True, False):
        buffer = np.random.default_rng(0).standard_normal(6000).astype("float32")
        weights, gradient = buffer[2000:3500], buffer[2000 + shift : 3500 + shift]
        optimizer = made(rule, "auto" if overlapping else "reference")
        optimizer.update("w", weights, gradient if overlapping else gradient.copy())
        if overlapping:
            assert optimizer.engine == "fused"
        results.append({"w": weights.copy()})
    Both(optimizer, optimizer, *results).agree()


@every_rule
def test_a_narrow_gradient_in_the_memory_of_its_parameter(rule: str) -> None:
    """The same address, and another dtype: by the time it is read it may be gone."""
    for order in ("first half", "second half"):
        results = []
        for own in (True, False):
            weights = np.random.default_rng(0).standard_normal(3000).astype("float32")
            halves = weights.view("float16").reshape(2, -1)[0 if order == "first half" else 1]
            with np.errstate(all="ignore"):
                gradient = np.nan_to_num(halves, posinf=1, neginf=1)
            optimizer = made(rule, "auto" if own else "reference")
            halves[...] = gradient
            optimizer.update("w", weights, halves if own else gradient)
            results.append({"w": weights})
        Both(optimizer, optimizer, *results).agree()


# ---- what is held beside state: nothing of the caller's


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
