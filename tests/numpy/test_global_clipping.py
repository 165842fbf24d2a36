"""Options for the gradients of a whole step: their joint norm is bounded, or their sign is turned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from published_runs import error
from raw_arrays import Make, bfloat16, bits, every_case, gradients, model, refused, train
from tolerances import FLOAT64, ONE_STEP_FLOAT64

from thalweg.errors import OptionError
from thalweg.numpy import LAMB, LARS


def joint_norm(grads: dict[str, Any]) -> float:
    return float(np.sqrt(sum(np.sum(g.astype("float64") ** 2) for g in grads.values())))


def nonempty(params: dict[str, Any]) -> list[Any]:
    return [p for p in params.values() if p.size]


class TestMaxGradNorm:
    @every_case
    def test_it_equals_scaling_by_hand(self, make: Make) -> None:
        limit, grads = 2.0, gradients(4, "float64")
        assert min(map(joint_norm, grads)) > limit
        clipped = train(make(max_grad_norm=limit), model("float64"), grads)
        scaled = [{name: np.asarray(g * (limit / joint_norm(step))) for name, g in step.items()} for step in grads]
        by_hand = train(make(), model("float64"), scaled)
        assert error(nonempty(clipped), nonempty(by_hand), nonempty(model("float64"))) < FLOAT64

    @every_case
    def test_below_the_limit_nothing_happens(self, make: Make) -> None:
        grads = gradients(3)
        limit = 1.001 * max(map(joint_norm, grads))
        assert bits(train(make(max_grad_norm=limit), model(), grads)) == bits(train(make(), model(), grads))

    def test_by_hand(self) -> None:
        a, b = np.zeros(1), np.zeros(1)
        optimizer = LARS(1.0, trust=False, momentum=0.0, max_grad_norm=2.5)
        optimizer.step({"a": a, "b": b}, {"a": np.array([3.0]), "b": np.array([4.0])})
        assert (a[0], b[0]) == (-1.5, -2.0)

    def test_absent_gradients_do_not_count(self) -> None:
        a, b = np.zeros(1), np.zeros(1)
        optimizer = LARS(1.0, trust=False, momentum=0.0, max_grad_norm=1.5)
        optimizer.step({"a": a, "b": b}, {"a": np.array([3.0]), "b": None})
        assert (a[0], b[0]) == (-1.5, 0.0)

    def test_a_step_of_zeros_stays_one(self) -> None:
        params = {"a": np.ones(3)}
        LARS(1.0, trust=False, max_grad_norm=1.0).step(params, {"a": np.zeros(3)})
        assert (params["a"] == 1).all()

    @every_case
    def test_it_is_refused_where_gradients_come_one_by_one(self, make: Make) -> None:
        optimizer, weights = make(max_grad_norm=1.0), np.ones(3)
        with refused(OptionError, r"max_grad_norm needs all gradients.*step\(params, grads\)", optimizer, weights):
            optimizer.update("w", weights, np.ones(3))

    @pytest.mark.parametrize("variant", ["apex", "nvlamb", "lambc"])
    def test_variants_that_clip_are_held_to_it(self, variant: str) -> None:
        optimizer, weights = LAMB(0.1, variant=variant), np.ones(3)
        with refused(OptionError, "max_grad_norm", optimizer, weights):
            optimizer.update("w", weights, np.ones(3))
        optimizer.with_max_grad_norm(None).update("w", weights, np.ones(3))
        assert (weights < 1).all()

    @pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
    def test_the_norm_is_taken_in_wide_numbers(self, name: str) -> None:
        """300 squared is beyond float16, 1e25 squared beyond float32."""
        dtype = bfloat16() if name == "bfloat16" else np.dtype(name)
        value = 1e25 if name != "float16" else 300.0
        gradient = np.full(16, value).astype(dtype)
        params = {"w": np.zeros(16, "float32")}
        LARS(1.0, trust=False, max_grad_norm=4.0, on_nonfinite="raise").step(params, {"w": gradient})
        assert np.allclose(params["w"], -1.0, rtol=np.finfo("float32").eps * 4, atol=0)

    @every_case
    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_one_that_is_not_finite_spoils_all_and_all_are_skipped(self, make: Make, poison: float) -> None:
        optimizer, params, (step,) = make(max_grad_norm=1.0, on_nonfinite="skip"), model(), gradients(1)
        step["conv"][0] = poison
        optimizer.step(params, step)
        assert bits(params) == bits(model())
        assert all(count == 1 for name, count in optimizer.skipped.items() if name != "empty")

    def test_squares_beyond_float64_bring_no_warning(self) -> None:
        optimizer, params = LARS(1.0, max_grad_norm=1.0, on_nonfinite="skip"), {"w": np.ones(3)}
        optimizer.step(params, {"w": np.full(3, 1e200)})
        assert (params["w"] == 1).all()

    def test_it_differs_from_clipping_each(self) -> None:
        """Or else the norm would not be the joint one."""
        options = dict(lr=1.0, trust=False, max_grad_norm=1.0)
        joint, alone, (step,) = model(), model(), gradients(1)
        LARS(**options).step(joint, step)
        LARS(**options).step({"conv": alone["conv"]}, {"conv": step["conv"]})
        assert not np.array_equal(joint["conv"], alone["conv"])


class TestMaximize:
    @every_case
    @pytest.mark.parametrize("options", [{}, dict(max_grad_norm=1.0)], ids=["alone", "clipped"])
    def test_it_equals_negated_gradients(self, make: Make, options: dict[str, Any]) -> None:
        grads = gradients(4)
        negated = [{name: np.asarray(-g) for name, g in step.items()} for step in grads]
        climbing, descending = make(maximize=True, **options), make(**options)
        first, second = train(climbing, model(), grads), train(descending, model(), negated)
        assert bits(first) == bits(second)
        assert bits(climbing.state) == bits(descending.state)
        assert bits(first) != bits(train(make(**options), model(), grads))

    def test_it_climbs(self) -> None:
        x = np.zeros(1)
        LARS(0.1, maximize=True).update("x", x, np.ones(1))
        assert x[0] > 0


def test_one_step_of_each_kind_in_float64() -> None:
    params = {"w": np.full(4, 2.0)}
    LARS(0.5, trust=False, momentum=0.0, max_grad_norm=1.0, maximize=True).step(params, {"w": np.ones(4)})
    assert np.abs(params["w"] - 2.25).max() < ONE_STEP_FLOAT64
