"""The joint norm of the gradients of a step is bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published_runs import error
from raw_arrays import Make, bfloat16, bits, every_case, gradients, model, refused, train
from tolerances import FLOAT64

from thalweg.errors import OptionError
from thalweg.numpy import LAMB, LARS


def joint_norm(grads: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.sum(g.astype("float64") ** 2) for g in grads.values())))


def nonempty(params: dict[str, Any]) -> list[Any]:
    return [p for p in params.values() if p.size]


@every_case
def test_it_equals_scaling_by_hand(make: Make) -> None:
    limit, grads = 2.0, gradients(4, "float64")
    assert min(map(joint_norm, grads)) > limit
    clipped = train(make(max_grad_norm=limit), model("float64"), grads)
    scaled = [{name: np.asarray(g * (limit / joint_norm(step))) for name, g in step.items()} for step in grads]
    by_hand = train(make(), model("float64"), scaled)
    assert error(nonempty(clipped), nonempty(by_hand), nonempty(model("float64"))) < FLOAT64
    free = 1.001 * max(map(joint_norm, grads))
    assert bits(train(make(max_grad_norm=free), model(), grads)) == bits(train(make(), model(), grads))


@pytest.mark.parametrize(
    ("limit", "grads", "wanted"),
    [
        (2.5, {"a": 3.0, "b": 4.0}, {"a": -1.5, "b": -2.0}),
        (1.5, {"a": 3.0, "b": None}, {"a": -1.5, "b": 0.0}),
        (1.0, {"a": 0.0, "b": 0.0}, {"a": 0.0, "b": 0.0}),
    ],
    ids=str,
)
def test_by_hand(limit: float, grads: dict[str, Any], wanted: dict[str, float]) -> None:
    params = {name: np.zeros(1) for name in grads}
    given = {name: None if g is None else np.array([g]) for name, g in grads.items()}
    LARS(1.0, trust=False, momentum=0.0, max_grad_norm=limit).step(params, given)
    assert {name: p[0] for name, p in params.items()} == wanted


@pytest.mark.parametrize("variant", [None, "apex", "nvlamb", "lambc"])
def test_it_is_refused_where_gradients_come_one_by_one(variant: str | None) -> None:
    """Also where a variant brings it."""
    optimizer, weights = LAMB(0.1, variant=variant) if variant else LAMB(0.1, max_grad_norm=1.0), np.ones(3)
    with refused(OptionError, r"max_grad_norm needs all gradients.*step\(params, grads\)", optimizer, weights):
        optimizer.update("w", weights, np.ones(3))
    optimizer.with_max_grad_norm(None).update("w", weights, np.ones(3))
    assert (weights < 1).all()


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_the_norm_is_taken_in_wide_numbers(name: str) -> None:
    """300 squared is beyond float16, 1e25 squared beyond float32."""
    dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
    gradient = np.full(16, 1e25 if name != "float16" else 300.0).astype(dtype)
    params = {"w": np.zeros(16, "float32")}
    LARS(1.0, trust=False, max_grad_norm=4.0, on_nonfinite="raise").step(params, {"w": gradient})
    assert np.allclose(params["w"], -1.0, rtol=np.finfo("float32").eps * 4, atol=0)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e200])
def test_one_that_is_not_finite_spoils_all_and_all_are_skipped(poison: float) -> None:
    """1e200: its square is beyond float64, which brings no warning."""
    optimizer, params = LARS(1.0, max_grad_norm=1.0, on_nonfinite="skip"), model("float64")
    (step,) = gradients(1, "float64")
    step["conv"][0] = poison
    optimizer.step(params, step)
    assert bits(params) == bits(model("float64"))
    assert all(count == 1 for name, count in optimizer.skipped.items() if name != "empty")
