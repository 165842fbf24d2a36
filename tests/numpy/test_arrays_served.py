"""Which arrays can be stepped. test_lean_state.py has dtypes of state, tests/engines shapes and where gradients lie."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agree import dtype_of
from raw_arrays import FRONT_END, Make, bits, every_case, gradients, model

from thalweg.numpy import LAMB, LARS

DTYPES = ["float32", "float64", "float16", "bfloat16"]


@every_case
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_results_of_16_bits_are_those_of_float32_rounded_once(make: Make, name: str) -> None:
    dtype = dtype_of(name)
    narrow, optimizer, reference = model(dtype), make(), make()
    for step in gradients(3, dtype):
        wide = {key: p.astype("float32") for key, p in narrow.items()}
        reference.step(wide, {key: g.astype("float32") for key, g in step.items()})
        optimizer.step(narrow, step)
        assert bits(narrow) == bits({key: p.astype(dtype) for key, p in wide.items()})
    assert bits(narrow) != bits(model(dtype))
    assert bits(optimizer.state) == bits(reference.state)


def test_an_array_on_disk_is_an_array(tmp_path: Path) -> None:
    weights = np.memmap(tmp_path / "weights", dtype="float32", mode="w+", shape=(3, 2))
    weights[...], twin = 1, np.ones((3, 2), "float32")
    LAMB(0.1).update("w", weights, np.full((3, 2), 0.5, "float32"))
    LAMB(0.1).update("w", twin, np.full((3, 2), 0.5, "float32"))
    weights.flush()
    assert (tmp_path / "weights").read_bytes() == twin.tobytes()


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("whole", [False, True], ids=["alone", "among others"])
def test_a_matrix_whose_star_is_not_elementwise(whole: bool) -> None:
    """numpy.matrix is an array, and is served as one."""
    start, gradient = np.arange(1.0, 10.0).reshape(3, 3), np.eye(3) + 1
    twin, weights = start.copy(), np.matrix(start)
    params = {"a": start.copy(), "w": weights} if whole else {"w": weights}
    LAMB(0.1).update("w", twin, gradient)
    LAMB(0.1).step(params, {name: np.matrix(gradient) if name == "w" else gradient for name in params})
    assert all(np.array_equal(p, twin) for p in params.values())
    assert type(weights) is np.matrix


@every_case
def test_a_number_is_a_vector_of_one_and_its_state_is_made_of_arrays(make: Make) -> None:
    number, vector = np.full((), 0.5), np.full(1, 0.5)
    one, two = make(), make()
    for g in (1.0, -0.25, 0.5):
        one.update("w", number, np.full((), g))
        two.update("w", vector, np.full(1, g), shape=(1,))
    assert number.tobytes() == vector.tobytes()
    assert {type(entry) for entry in one.state["w"].values()} == {np.ndarray}


@pytest.mark.parametrize("name", DTYPES)
def test_arithmetic_on_numbers_gives_gradients(name: str) -> None:
    """x * x of a 0-d array x is no array, but a numpy scalar."""
    weights, twin = np.full((), 2).astype(dtype_of(name)), np.full((), 2).astype(dtype_of(name))
    LARS(100.0).update("w", weights, weights * weights)
    LARS(100.0).update("w", twin, np.array(4.0))
    assert bits(weights) == bits(twin) != bits(np.full((), 2).astype(dtype_of(name)))


@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize("rule", FRONT_END)
def test_state_lies_in_nobody_elses_memory(rule: str, engine: Any) -> None:
    """Some keep a gradient as it is, and whoever fills it anew would change what is kept; some step a batch."""
    for dtype in ("float32", "float64"):
        optimizer, params = FRONT_END[rule](0.1, engine=engine), {name: np.full((3, 4), 0.5, dtype) for name in "ab"}
        gradient = np.linspace(-1, 1, 12).reshape(3, 4).astype(dtype)
        gradient.flags.writeable = False
        for _ in range(2):
            optimizer.step(params, dict.fromkeys(params, gradient))
        kept = [x for entries in optimizer.state.values() for key, x in entries.items() if key != "step"]
        pairs = itertools.combinations([*kept, *params.values(), gradient], 2)
        assert not any(np.shares_memory(x, y) for x, y in pairs)


def test_what_is_cleared_is_forgotten_its_shape_too() -> None:
    optimizer = LAMB(0.1, global_step=True)
    optimizer.update("a", np.ones(3), np.ones(3))
    optimizer.end_iteration()
    optimizer.clear_state()
    assert (optimizer.num_parameters, optimizer.iteration, optimizer.state) == (0, 0, {})
    optimizer.update("a", fresh := np.ones((2, 2)), np.ones((2, 2)))
    LAMB(0.1).update("a", twin := np.ones((2, 2)), np.ones((2, 2)))
    assert bits(fresh) == bits(twin)
