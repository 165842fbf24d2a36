"""Steps that are not finite, by native code: it decides as its rule does, and what is refused is not begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lanes import by_turns
from raw_arrays import Arrays, bits, copies
from side_by_side import Both, assert_close, draw, draw_gradients, every_rule, kind, made, needs_core

from thalweg.errors import NonFiniteError
from thalweg.kernels.threads import set_num_threads

pytestmark = needs_core

#: Unfactored and factored, and one that stays as it is.
SHAPES = {"vector": (1500,), "matrix": (40, 30), "bystander": (33,)}
#: Several tasks, for several threads.
LARGE = {"vector": (70_000,), "matrix": (300, 250), "bystander": (33,)}
OPTIONS: dict[str, dict[str, Any]] = {
    "LARS": dict(weight_decay=0.1),
    "LAMB": dict(weight_decay=0.1),
    "Adafactor": dict(weight_decay=0.1, min_dim_size_to_factor=2),
}
VALUES = [np.nan, np.inf, -np.inf, 3e38, 1e30, 1e20, 2e19, 1e19, 1e15, 1e-15, 1e-30, 1e-42, 0.0]
policies = pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])


@pytest.fixture(autouse=True)
def _several_threads() -> Any:
    set_num_threads(2)
    yield
    set_num_threads(None)


def decisions(rule: str, params: Arrays, grads: list[Arrays], **options: Any) -> tuple[Both, bool]:
    """Both engines after steps of which the last may be refused; whether it was. What is refused is not begun."""
    both, raised = [], []
    for engine in ("fused", "reference"):
        optimizer, arrays = made(rule, engine, **{**OPTIONS[rule], **options}), copies(params)
        for step in grads[:-1]:
            optimizer.step(arrays, step)
        before = bits(arrays), bits(optimizer.state), optimizer.skipped
        message = ""
        try:
            optimizer.step(arrays, grads[-1])
        except NonFiniteError as error:
            message = str(error)
            assert (bits(arrays), bits(optimizer.state), optimizer.skipped) == before
        for name, count in optimizer.skipped.items():
            if count and grads[:-1]:
                assert bits(arrays[name]) == before[0][name]
                assert bits(optimizer.state[name]) == before[1][name]
        both.append((optimizer, arrays))
        raised.append(message)
    assert raised[0] == raised[1]
    (fused, found), (reference, expected) = both
    return Both(fused, reference, found, expected, params), bool(raised[0])


def check(rule: str, params: Arrays, grads: list[Arrays], **options: Any) -> None:
    both, raised = decisions(rule, params, grads, **options)
    if not raised:
        both.agree()


def poisoned(step: Arrays, value: float, where: str) -> Arrays:
    bad = copies(step)
    for name in ("vector", "matrix"):
        if name == "matrix" and where == "everywhere" and value == 1e19:
            continue  # a test of its own
        flat = bad[name].reshape(-1)
        flat[{"first": 0, "middle": flat.size // 2, "last": -1, "everywhere": slice(None)}[where]] = value
    return bad


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("where", ["first", "middle", "last", "everywhere"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strange_gradients_after_good_ones(rule: str, policy: str, where: str, dtype: str) -> None:
    good, bad = draw_gradients(SHAPES, dtype, 2)
    for value in VALUES if dtype == "float32" else [*VALUES, 1e300, 1e160, 1e-200]:
        check(rule, draw(SHAPES, dtype), [good, poisoned(bad, value, where)], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
def test_strange_gradients_that_several_threads_see(rule: str, policy: str) -> None:
    good, bad = draw_gradients(LARGE, "float32", 2)
    for value in (np.nan, 1e25, 1e-30):
        for where in ("first", "last"):
            check(rule, draw(LARGE, "float32"), [good, poisoned(bad, value, where)], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("where", ["last", "everywhere"])
def test_strange_gradients_at_the_first_step(rule: str, policy: str, where: str) -> None:
    (bad,) = draw_gradients(SHAPES, "float32", 1)
    for value in VALUES:
        check(rule, draw(SHAPES, "float32"), [poisoned(bad, value, where)], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_strange_gradients_in_sixteen_bits(rule: str, policy: str, dtype: str) -> None:
    good, bad = draw_gradients(SHAPES, dtype, 2)
    for value in (np.nan, np.inf, 60_000.0, 6e-8, *((3e38, 1e19, 1e-38) if dtype == "bfloat16" else ())):
        for where in ("middle", "everywhere"):
            check(rule, draw(SHAPES, dtype), [good, poisoned(bad, value, where)], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strange_parameters(rule: str, policy: str, dtype: str) -> None:
    (step,) = draw_gradients(SHAPES, dtype, 1)
    for value in (*VALUES, *([1e200, 1e-200] if dtype == "float64" else [])):
        for where in ("first", "everywhere"):
            check(rule, poisoned(draw(SHAPES, dtype), value, where), [step], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
def test_strange_gradients_that_are_clipped_by_their_joint_norm(rule: str, policy: str) -> None:
    good, bad = draw_gradients(SHAPES, "float32", 2)
    for value in VALUES:
        step = poisoned(bad, value, "middle")
        check(rule, draw(SHAPES, "float32"), [good, step], on_nonfinite=policy, max_grad_norm=1.0)


def test_a_parameter_of_zeros_whose_gradient_has_a_nan() -> None:
    """Other elements are stepped as they would be: a tensor of zeros has the ratio of zeros."""
    for policy in ("propagate", "skip", "raise"):
        params = {"w": np.zeros(5, "float32")}
        check("LARS", params, [{"w": np.array([1, 2, np.nan, 3, 4], "float32")}], on_nonfinite=policy)


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_sums_that_only_float64_can_hold(rule: str, policy: str) -> None:
    """Each square is finite, and their sum is beyond float32: nothing is wrong with such a step."""
    for shape in ((1025,), (20, 30), (70_000,)):
        params = {"w": np.ones(shape, "float32")}
        for value in (1e18, 1e19):
            step = {"w": np.full(shape, value, "float32")}
            options = dict(min_dim_size_to_factor=1000) if rule == "Adafactor" else {}
            both, raised = decisions(rule, params, [step, step], on_nonfinite=policy, **options)
            assert not raised
            assert set(both.fused.skipped.values()) == {0}
            both.agree()


@by_turns()
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("shape", [(2, 1000), (40, 30), (600, 600)], ids=str)
def test_sums_of_rows_and_columns_that_only_float64_can_hold(policy: str, shape: Any) -> None:
    for value in (1e15, 1e17, 1e18, 1e19):
        params, step = {"w": np.ones(shape, "float32")}, {"w": np.full(shape, value, "float32")}
        check("Adafactor", params, [step], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e15, 1e-15, 0.0])
def test_strange_gradients_in_one_slice_of_a_stack(rule: str, policy: str, value: float) -> None:
    """A stack is one parameter: it is stepped as a whole, or not at all."""
    both, raised = strange_slice(rule, policy, value)
    if not raised:
        both.agree()


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["propagate", "skip"])
def test_a_slice_whose_squares_vanish_in_float32(rule: str, policy: str) -> None:
    """How long such a gradient is can hardly be told; what is done about it must be the same."""
    for value in (1e-22, 1e-30, 1e-42):
        both, _ = strange_slice(rule, policy, value)
        assert_close("w", both.found["w"], both.expected["w"], "float32")


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_slice_whose_sum_of_squares_only_float64_can_hold(rule: str, policy: str) -> None:
    for value in (1e17, 1e18, 1e19):
        both, raised = strange_slice(rule, policy, value)
        if not raised:
            both.agree()


def strange_slice(rule: str, policy: str, value: float) -> tuple[Both, bool]:
    shapes = {"w": (4, 20, 10), "b": (4, 3)}
    good, bad = draw_gradients(shapes, "float32", 2)
    bad["w"][2] = value
    options = dict(min_dim_size_to_factor=1000) if rule == "Adafactor" else {}
    return decisions(rule, draw(shapes, "float32"), [good, bad], on_nonfinite=policy, stacked_axes=1, **options)


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_the_others_go_on_or_nothing_does(rule: str, policy: str) -> None:
    params, (good, bad) = draw(SHAPES, "float32"), draw_gradients(SHAPES, "float32", 2)
    bad["matrix"][3, 3] = np.nan
    both, raised = decisions(rule, params, [good, bad], on_nonfinite=policy)
    assert raised == (policy == "raise")
    counts = {name: int(entries["step"]) for name, entries in both.fused.state.items()}
    if raised:
        assert counts == dict.fromkeys(SHAPES, 1)
    else:
        assert counts == {**dict.fromkeys(SHAPES, 2), "matrix": 1}
        assert both.fused.skipped == {**dict.fromkeys(SHAPES, 0), "matrix": 1}
        both.agree()


@every_rule
def test_a_refused_first_step_leaves_no_trace(rule: str) -> None:
    optimizer, params = made(rule, "fused", on_nonfinite="raise"), draw(SHAPES, "float32")
    (step,) = draw_gradients(SHAPES, "float32", 1)
    before = bits(params)
    with pytest.raises(NonFiniteError, match="parameter 'vector', step 1"):
        optimizer.step(params, {**step, "vector": np.full(1500, np.inf, "float32")})
    assert bits(params) == before
    assert optimizer.state == {}
    optimizer.step(params, step)
    twin, twins = made(rule, "fused"), draw(SHAPES, "float32")
    twin.step(twins, step)
    assert bits(params) == bits(twins)
    assert bits(optimizer.state) == bits(twin.state)


@by_turns()
@every_rule
@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_that_are_too_large_for_the_parameter(rule: str, policy: str, dtype: str) -> None:
    """float16 ends at 65504: gradients are fine, and what would be written is not."""
    largest = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}[dtype]
    for shape in ((50,), (30, 40), (70_000,)):
        params = {"w": np.full(shape, 1.0).astype(kind(dtype)), "b": np.ones(3).astype(kind(dtype))}
        params["w"].reshape(-1)[-1] = largest
        step = {"w": np.full(shape, -1.0, "float32"), "b": np.ones(3, "float32")}
        options: dict[str, Any] = dict(min_dim_size_to_factor=2) if rule == "Adafactor" else dict(trust=False)
        for lr in (1e-9, 10.0, largest / 1000):
            check(rule, params, [step], on_nonfinite=policy, lr=lr, **options)
