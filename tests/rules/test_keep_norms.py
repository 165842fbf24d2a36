"""keep_norms=True: a step turns a tensor that has a trust ratio, and leaves its norm as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg.numpy

SHAPES = {"matrix": (6, 5), "cube": (2, 3, 4), "vector": (7,)}
LR = {"LAMB": 0.3, "LARS": 50.0}
both = pytest.mark.parametrize("name", list(LR))


def drawn(seed: int, **changed: Any) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape) for key, shape in SHAPES.items()} | changed


def optimizer(name: str, **options: Any) -> Any:
    return getattr(thalweg.numpy, name)(LR[name], **{"weight_decay": 0.1, "keep_norms": True, **options})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param("LAMB", dict(weight_decay_mode=mode), id=mode) for mode in ("in_update", "decoupled", "l2")),
        pytest.param("LAMB", dict(always_adapt=False, weight_decay=0.0), id="a ratio of 1"),
        pytest.param("LARS", {}, id="LARS"),
        pytest.param("LARS", dict(nesterov=True, momentum_mode="lr_outside"), id="nesterov"),
    ],
)
def test_a_step_is_the_usual_one_and_then_a_return_to_the_norm(name: str, options: Any) -> None:
    """Ten steps, none of which is small; by hand the norm is found anew from the parameter itself."""
    params, expected = drawn(0), drawn(0)
    kept = optimizer(name, exempt="vectors", **options)
    free = optimizer(name, exempt="vectors", **options, keep_norms=False)
    norms = {key: np.linalg.norm(p) for key, p in expected.items()}
    for step in range(10):
        grads = drawn(step + 1)
        kept.step(params, grads)
        free.step(expected, grads)
        for key in ("matrix", "cube"):
            assert abs(np.linalg.norm(expected[key]) / norms[key] - 1) > 1e-4
            expected[key] *= norms[key] / np.linalg.norm(expected[key])
        for key in SHAPES:
            np.testing.assert_allclose(params[key], expected[key], rtol=1e-11, err_msg=key)
    assert abs(np.linalg.norm(params["vector"]) / norms["vector"] - 1) > 0.1, "a vector that is exempt is not held"


@both
def test_a_tensor_of_zeros_takes_its_first_step_and_keeps_that_norm(name: str) -> None:
    params, free = drawn(0, matrix=np.zeros((6, 5))), drawn(0, matrix=np.zeros((6, 5)))
    kept = optimizer(name)
    kept.step(params, drawn(1))
    optimizer(name, keep_norms=False).step(free, drawn(1))
    assert np.array_equal(params["matrix"], free["matrix"])
    norm = np.linalg.norm(params["matrix"])
    assert norm > 0
    kept.step(params, drawn(2))
    np.testing.assert_allclose(np.linalg.norm(params["matrix"]), norm, rtol=1e-12)


@both
def test_slices_of_a_stack_keep_norms_of_their_own(name: str) -> None:
    params = drawn(0)
    norms = np.linalg.norm(params["cube"], axis=(1, 2))
    optimizer(name, overrides=[("cube", dict(stacked_axes=1))]).step(params, drawn(1))
    np.testing.assert_allclose(np.linalg.norm(params["cube"], axis=(1, 2)), norms, rtol=1e-12)


@both
def test_norms_do_not_drift_in_float32(name: str) -> None:
    params = {key: p.astype(np.float32) for key, p in drawn(0).items()}
    norm = np.linalg.norm(params["matrix"].astype(float))
    own = optimizer(name)
    for step in range(300):
        own.step(params, {key: g.astype(np.float32) for key, g in drawn(step).items()})
    np.testing.assert_allclose(np.linalg.norm(params["matrix"].astype(float)), norm, rtol=3e-6)


@both
def test_what_does_not_go_together_is_told(name: str) -> None:
    with pytest.raises(ValueError, match=r"keep_norms must be True or False, got 1\b"):
        optimizer(name, keep_norms=1)
    with pytest.raises(ValueError, match=r"keep_norms.*trust=True"):
        optimizer(name, trust=False)
