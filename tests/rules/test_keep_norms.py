"""keep_norms=True: a step turns a tensor that has a trust ratio, and leaves its norm as it was."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import thalweg.numpy
from thalweg import rules
from thalweg.errors import NonFiniteError
from thalweg.spaces import numpy as xp

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
def test_norms_do_not_drift_in_float32_and_slices_of_a_stack_have_their_own(name: str) -> None:
    params = {key: p.astype(np.float32) for key, p in drawn(0).items()}
    before = {key: p.astype(float) for key, p in params.items()}
    own = optimizer(name, overrides=[("cube", dict(stacked_axes=1))])
    for step in range(300):
        own.step(params, {key: g.astype(np.float32) for key, g in drawn(step).items()})
    for key, axes in (("matrix", None), ("cube", (1, 2))):
        norms = (np.linalg.norm(x.astype(float), axis=axes) for x in (params[key], before[key]))
        np.testing.assert_allclose(*norms, rtol=3e-6)


def grown(rule: Any, lr: float, p: Any, g: Any) -> float:
    """By which part of itself p grows along itself in a first step, summed in float64."""
    update = rule.update(xp, g, rule.init(xp, p), p, t=1, lr=lr)
    wide = p.astype(float)
    return float(np.sum(wide * np.asarray(update.delta, float)) / np.sum(wide * wide))


@pytest.mark.parametrize("mode", ["in_update", "decoupled"])
@pytest.mark.parametrize("lr", [1e-2, 1e-4])
def test_what_lamb_takes_back_in_float32_is_exact_however_small(lr: float, mode: Any) -> None:
    """About lr**2 / 2 of p: what rounded norms of float32 tell of it is wrong by 3e-8 of p.

    As a stack of one, since norms of slices are in float32; so are all norms in torch and jax.
    """
    rule = rules.LAMB(keep_norms=True, weight_decay=0.01, weight_decay_mode=mode, stacked_axes=1)
    p, g = np.random.default_rng(0).standard_normal((2, 1, 60, 50))
    exact, single = grown(rule, lr, p, g), grown(rule, lr, p.astype(np.float32), g.astype(np.float32))
    assert abs(exact) == pytest.approx(lr * lr / 2, rel=0.01)
    assert single == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("lr", [0.9995, 0.9998, 1.0, 1.0001])
def test_a_step_that_takes_nearly_all_of_a_tensor_makes_nothing_large(lr: float) -> None:
    """Without a gradient u is p, so that 1 - lr of it is left: what the sums tell of that is rounding alone."""
    for seed in range(100):
        p = drawn(seed)["matrix"].astype(np.float32)
        norm = np.linalg.norm(p.astype(float))
        thalweg.numpy.LAMB(lr, weight_decay=0.1, keep_norms=True).update("p", p, np.zeros_like(p))
        assert np.linalg.norm(p.astype(float)) < 1.05 * norm


@pytest.mark.parametrize(("name", "options"), [("LAMB", dict(always_adapt=False, weight_decay=0.0)), ("LARS", {})])
def test_a_step_too_large_to_be_squared_does_not_end_at_zero(name: str, options: Any) -> None:
    first = {"cube": drawn(0)["cube"].astype(np.float32)}
    grads = {"cube": drawn(1)["cube"].astype(np.float32)}

    def stepped(**more: Any) -> Any:
        params = {"cube": first["cube"].copy()}
        own = optimizer(name, engine="reference", stacked_axes=1, **options, **more).with_lr(1e30)
        own.step(params, grads)
        return params["cube"]

    assert np.abs(stepped()).max() != 0
    assert np.array_equal(stepped(on_nonfinite="skip"), first["cube"])
    with pytest.raises(NonFiniteError, match="cube"):
        stepped(on_nonfinite="raise")
