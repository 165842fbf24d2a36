"""Steps that are not finite, by native code: it decides as its rule does, and what is refused is not begun."""

from __future__ import annotations

import itertools
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
WIDE = [np.nan, np.inf, -np.inf, 3e38, 1e30, 1e20, 2e19, 1e19, 1e15, 1e-15, 1e-30, 1e-42, 0.0]
VALUES = {
    "float32": WIDE,
    "float64": [*WIDE, 1e300, 1e160, 1e-200],
    "float16": [np.nan, np.inf, 60_000.0, 6e-8],
    "bfloat16": [np.nan, np.inf, 60_000.0, 6e-8, 3e38, 1e19, 1e-38],
}
policies = pytest.mark.parametrize("policy", ["propagate", "skip", "raise"])
guards = pytest.mark.parametrize("policy", ["skip", "raise"])


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


#: What is strange about the last step: its dtype, where, after how many good steps, and what else is asked for.
STRANGE: list[tuple[str, str, int, dict[str, Any]]] = [
    *((dtype, where, 1, {}) for where in ("first", "middle", "last", "everywhere") for dtype in ("float32", "float64")),
    *((dtype, where, 1, {}) for where in ("middle", "everywhere") for dtype in ("float16", "bfloat16")),
    *(("float32", where, 0, {}) for where in ("last", "everywhere")),
    ("float32", "middle", 1, dict(max_grad_norm=1.0)),
]


@by_turns("dtype")
@every_rule
@policies
@pytest.mark.parametrize(("dtype", "where", "good", "options"), STRANGE, ids=str)
def test_strange_gradients(rule: str, policy: str, dtype: str, where: str, good: int, options: dict) -> None:
    *before, bad = draw_gradients(SHAPES, dtype, good + 1)
    for value in VALUES[dtype]:
        steps = [*before, poisoned(bad, value, where)]
        check(rule, draw(SHAPES, dtype), steps, on_nonfinite=policy, **options)


@by_turns()
@every_rule
@policies
def test_strange_gradients_that_several_threads_see(rule: str, policy: str) -> None:
    good, bad = draw_gradients(LARGE, "float32", 2)
    for value, where in itertools.product((np.nan, 1e25, 1e-30), ("first", "last")):
        check(rule, draw(LARGE, "float32"), [good, poisoned(bad, value, where)], on_nonfinite=policy)


@by_turns()
@every_rule
@policies
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_strange_parameters(rule: str, policy: str, dtype: str) -> None:
    (step,) = draw_gradients(SHAPES, dtype, 1)
    for value, where in itertools.product(VALUES[dtype], ("first", "everywhere")):
        check(rule, poisoned(draw(SHAPES, dtype), value, where), [step], on_nonfinite=policy)


def test_a_parameter_of_zeros_whose_gradient_has_a_nan() -> None:
    """Other elements are stepped as they would be: a tensor of zeros has the ratio of zeros."""
    for policy in ("propagate", "skip", "raise"):
        params = {"w": np.zeros(5, "float32")}
        check("LARS", params, [{"w": np.array([1, 2, np.nan, 3, 4], "float32")}], on_nonfinite=policy)


@by_turns()
@every_rule
@guards
def test_sums_that_only_float64_can_hold(rule: str, policy: str) -> None:
    """Each square is finite, and their sum is beyond float32: nothing is wrong with such a step."""
    for shape, value in itertools.product(((1025,), (20, 30), (70_000,)), (1e18, 1e19)):
        params, step = {"w": np.ones(shape, "float32")}, {"w": np.full(shape, value, "float32")}
        options = dict(min_dim_size_to_factor=1000) if rule == "Adafactor" else {}
        both, raised = decisions(rule, params, [step, step], on_nonfinite=policy, **options)
        assert not raised
        assert set(both.fused.skipped.values()) == {0}
        both.agree()


@by_turns()
@guards
@pytest.mark.parametrize("shape", [(2, 1000), (40, 30), (600, 600)], ids=str)
def test_sums_of_rows_and_columns_that_only_float64_can_hold(policy: str, shape: Any) -> None:
    for value in (1e15, 1e17, 1e18, 1e19):
        params, step = {"w": np.ones(shape, "float32")}, {"w": np.full(shape, value, "float32")}
        check("Adafactor", params, [step], on_nonfinite=policy)


@by_turns("value")
@every_rule
@policies
@pytest.mark.parametrize(
    "value", [np.nan, np.inf, 1e30, 1e19, 1e18, 1e17, 1e15, 1e-15, 1e-22, 1e-30, 1e-42, 0.0], ids=str
)
def test_strange_gradients_in_one_slice_of_a_stack(rule: str, policy: str, value: float) -> None:
    """A stack is one parameter: it is stepped as a whole, or not at all."""
    shapes = {"w": (4, 20, 10), "b": (4, 3)}
    good, bad = draw_gradients(shapes, "float32", 2)
    bad["w"][2] = value
    options: dict[str, Any] = dict(min_dim_size_to_factor=1000) if rule == "Adafactor" else {}
    options |= dict(on_nonfinite=policy, stacked_axes=1)
    both, raised = decisions(rule, draw(shapes, "float32"), [good, bad], **options)
    if 0 < value <= 1e-22:  # squares vanish: how long such a gradient is can hardly be told
        assert_close("w", both.found["w"], both.expected["w"], "float32")
    elif not raised:
        both.agree()


@by_turns()
@every_rule
@guards
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
@guards
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_results_that_are_too_large_for_the_parameter(rule: str, policy: str, dtype: str) -> None:
    """float16 ends at 65504: gradients are fine, and what would be written is not."""
    largest = {"float16": 65504.0, "bfloat16": 3.38e38, "float32": 3.4e38}[dtype]
    options: dict[str, Any] = dict(min_dim_size_to_factor=2) if rule == "Adafactor" else dict(trust=False)
    for shape, lr in itertools.product(((50,), (30, 40), (70_000,)), (1e-9, 10.0, largest / 1000)):
        params = {"w": np.full(shape, 1.0).astype(kind(dtype)), "b": np.ones(3).astype(kind(dtype))}
        params["w"].reshape(-1)[-1] = largest
        step = {"w": np.full(shape, -1.0, "float32"), "b": np.ones(3, "float32")}
        check(rule, params, [step], on_nonfinite=policy, lr=lr, **options)


# ---- the last number that can be written, and the first that cannot


def outcomes(rule: str, weights: Any, gradient: Any, **options: Any) -> list[Any]:
    """What became of a step, by native code and by the rule: whether it was taken, and all bits after it."""
    found = []
    for engine in ("fused", "reference"):
        optimizer, arrays = made(rule, engine, **options), weights.copy()
        try:
            optimizer.update("w", arrays, gradient)
            taken = "skipped" if optimizer.skipped["w"] else "taken"
        except NonFiniteError:
            taken = "refused"
        found.append((taken, bits(arrays), bits(optimizer.state)))
    return found


#: The largest finite number, and what must be added for the least result that is rounded to infinity.
EDGES = {"float16": (65504.0, 2.0**4), "bfloat16": (float.fromhex("0x1.fep127"), 2.0**119)}


@by_turns()
@guards
@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_last_parameter_and_the_first_beyond(policy: str, dtype: str, rounding: str) -> None:
    largest, distance = EDGES[dtype]
    factors = ((1 - 2**-12, True), (1.0, False), (1.5, False))
    for size, sign, (factor, fits) in itertools.product((1, 40, 2000), (1, -1), factors):
        start, gradient = np.zeros(size, kind(dtype)), np.zeros(size, "float32")
        start[-1], gradient[-1] = sign * largest, -sign
        options: dict[str, Any] = dict(lr=distance * factor, trust=False, momentum=0.0, rounding=rounding)
        found, expected = outcomes("LARS", start, gradient, **options, on_nonfinite=policy)
        assert found == expected
        if rounding == "nearest":
            assert (found[0] == "taken") == fits
        if found[0] != "taken":
            assert found[1] == bits(start)


@guards
def test_momentum_at_the_end_of_its_dtype(policy: str) -> None:
    values = (65503.0, 65519.0, 65519.996, 65519.9999999, 65520.0, 65521.0, 1e6)
    options: dict[str, Any] = dict(trust=False, on_nonfinite=policy)
    for wide, value in itertools.product(("float32", "float64"), values):
        gradient = np.zeros(300, wide)
        gradient[7] = value
        found, expected = outcomes("LARS", np.zeros(300, wide), gradient, lr=1.0, momentum_dtype="float16", **options)
        assert found == expected, (wide, value)
    # float32 state of float64 may overflow as its rule lets it
    options |= dict(lr=1e-100, momentum_mode="lr_outside", state_dtype="float32")
    found, expected = outcomes("LARS", np.ones(10), np.full(10, 1e100), **options)
    assert found == expected


@by_turns("rule")
@guards
@pytest.mark.parametrize("shape", [(40,), (30, 20)], ids=str)
@pytest.mark.parametrize(
    ("rule", "options", "largest"),
    [
        ("LARS", dict(lr=1.0, trust=False), 65504.0),
        ("LAMB", dict(betas=(0.9, 0.75)), 500.0),
        ("LAMB", dict(betas=(0.0, 0.75)), 500.0),
        ("Adafactor", {}, 250.0),
        ("Adafactor", dict(min_dim_size_to_factor=2), 250.0),
    ],
    ids=["LARS", "LAMB", "LAMB without momentum", "Adafactor", "Adafactor factored"],
)
def test_state_that_float16_cannot_hold(policy: str, shape: Any, rule: str, options: dict, largest: float) -> None:
    """As it is stored: gradients, parameters and what is written to them are all finite."""
    seen = set()
    for factor in (0.5, 0.99, 1.0, 1.01, 1.05, 2.0):
        gradient = np.full(shape, largest * factor, "float32")
        given = dict(options, state_dtype="float16", on_nonfinite=policy)
        found, expected = outcomes(rule, np.ones(shape, "float32"), gradient, **given)
        assert found[0] == expected[0], factor
        if found[0] != "taken":
            assert found == expected
        seen.add(found[0])
    assert len(seen) == 2, "the end was not reached, or never left"


THROWN: dict[str, dict[str, Any]] = {
    "LARS": dict(lr=1.0, trust=False, momentum=0.9),
    "LAMB": dict(lr=1000.0, trust=False, betas=(0.9, 0.9)),
    "Adafactor": dict(lr=500.0, momentum=0.9, clip_threshold=None, scale_parameter=False, min_dim_size_to_factor=2),
}


@by_turns()
@every_rule
@guards
@pytest.mark.parametrize("shape", [(500,), (40, 30)], ids=str)
def test_momentum_that_carries_over_the_edge_by_itself(rule: str, policy: str, shape: Any) -> None:
    """Gradients of zero, and a parameter that its momentum throws out of float16."""
    results = []
    for engine in ("fused", "reference"):
        optimizer, weights = made(rule, engine, **THROWN[rule], on_nonfinite=policy), np.zeros(shape, "float16")
        counts = [0]
        for t in range(12):
            weights[...] = np.where(weights < 0, -65_400.0, weights)
            before = bits(weights), bits(optimizer.state)
            try:
                optimizer.update("w", weights, np.full(shape, 1000.0 if t < 3 else 0.0, "float32"))
            except NonFiniteError:
                assert policy == "raise"
            counts.append(int(optimizer.state["w"]["step"]))
            if counts[-1] == counts[-2]:
                assert (bits(weights), bits(optimizer.state)) == before
        results.append(np.diff(counts).tolist())
    assert results[0] == results[1]
    assert set(results[0]) == {0, 1}


@pytest.mark.parametrize("engine", ["reference", "fused"])
@guards
def test_a_ratio_that_float32_cannot_hold(engine: str, policy: str) -> None:
    weights = np.full(4, 1000, np.float32)
    try:
        made("LAMB", engine, lr=1.0, on_nonfinite=policy).update("w", weights, np.full(4, 1e-42, np.float32))
    except NonFiniteError:
        assert policy == "raise"
    assert (weights == 1000).all()
