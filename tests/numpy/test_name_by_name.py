"""Arrays are stepped in place, one at a time, under their names."""

from __future__ import annotations

import itertools
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, cases_with_lr, every_case, gradients, model, refused, two_cases
from tolerances import FLOAT32

from thalweg.errors import NonFiniteError, OptionError, ParameterError
from thalweg.numpy import LAMB, LARS, Adafactor, Kron

NAME = "encoder.0.weight"


@every_case
def test_flat_buffers_get_the_numbers_of_shaped_arrays(make: Make) -> None:
    name = "conv"
    for flat_weights, flat_gradient in itertools.product((False, True), repeat=2):
        wanted, weights = model()[name], model()[name]
        first, second = make(), make()
        buffer = weights.reshape(-1) if flat_weights else weights
        for step in gradients(3):
            first.update(name, wanted, step[name])
            gradient = step[name].reshape(-1) if flat_gradient else step[name]
            second.update(name, buffer, gradient, shape=wanted.shape)
        assert bits(weights) == bits(wanted) != bits(model()[name])
        assert bits(first.state) == bits(second.state)


def test_a_shape_may_be_a_list_empty_and_given_now_and_then() -> None:
    optimizer, weights = LAMB(0.1), np.ones(6)
    optimizer.update("list", weights, np.ones(6), shape=[2, 3])
    optimizer.update("list", weights.reshape(2, 3), np.ones((2, 3)))
    optimizer.update("number", np.ones(1), np.ones(1), shape=())
    optimizer.update("integers", np.ones(6), np.ones(6), shape=(np.int64(3), np.int32(2)))
    assert {name: (int(entries["step"]), entries["exp_avg"].shape) for name, entries in optimizer.state.items()} == {
        "list": (2, (2, 3)),
        "number": (1, ()),
        "integers": (1, (3, 2)),
    }


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        pytest.param((3, 5), r"encoder.0.weight.*\(3, 5\).*flat with 15 elements", id="too many"),
        pytest.param((2, 2), r"encoder.0.weight.*\(2, 2\).*flat with 4 elements", id="too few"),
        pytest.param((-1, 3), "shape must be a tuple of whole numbers >= 0", id="minus one"),
        pytest.param((2.0, 6), "shape must be a tuple of whole numbers >= 0", id="fraction"),
        pytest.param(12, "shape must be a tuple of whole numbers >= 0", id="number"),
        pytest.param("12", "shape must be a tuple of whole numbers >= 0", id="text"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(shape: Any, said: str) -> None:
    optimizer, weights, gradient = LARS(0.1), np.ones(12), np.ones(12)
    with refused(ParameterError, said, optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient, shape=shape)


def test_only_flat_buffers_are_seen_in_another_shape() -> None:
    """A transposed array has as many elements, and other numbers in every place."""
    optimizer, weights, gradient = LARS(0.1), np.ones((4, 3)), np.ones((3, 4))
    with refused(ParameterError, r"encoder.0.weight.*\(4, 3\).*must be flat", optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient, shape=(3, 4))
    with refused(ParameterError, r"gradient of 'encoder.0.weight'.*must be flat", optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient, shape=(4, 3))


def test_a_flat_gradient_may_have_gaps() -> None:
    wide, (gaps, none) = np.arange(24.0), np.ones((2, 12))
    LARS(0.1).update(NAME, gaps, wide[::2], shape=(3, 4))
    LARS(0.1).update(NAME, none, wide[::2].copy(), shape=(3, 4))
    assert bits(gaps) == bits(none) != bits(np.ones(12))


@two_cases
def test_no_gradient_no_step(make: Make) -> None:
    optimizer, weights = make(), model()[NAME]
    optimizer.update(NAME, weights, None)
    assert bits(weights) == bits(model()[NAME])
    assert optimizer.num_parameters == 0
    optimizer.update(NAME, weights, gradients(1)[0][NAME])
    after = bits(optimizer.state), bits(weights)
    optimizer.update(NAME, weights, None)
    assert (bits(optimizer.state), bits(weights)) == after
    assert optimizer.state[NAME]["step"] == 1


# ---- buffers whose shape nobody has told: they are exempted from nothing

SIZE = 12
DECAYED: Any = dict(lr=0.02, weight_decay=0.1)


def step_thrice(optimizer: Any, shape: tuple[int, ...] | None, whole: bool = False) -> Any:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE).astype(np.float32)
    for t in range(3):
        gradient = (rng.standard_normal(SIZE) * (1 + t)).astype(np.float32)
        if whole:
            optimizer.step({"layer": weights}, {"layer": gradient})
        else:
            optimizer.update("layer", weights, gradient, shape=shape)
            optimizer.end_iteration()
    return bits(weights)


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_a_buffer_has_the_rule_of_matrices_unless_it_was_declared_a_vector(make: Any) -> None:
    """With a shape, or as an array of a whole model: there it is a bias, without decay and trust ratio."""
    options = dict(DECAYED, exempt="vectors")
    published = step_thrice(make(**dict(DECAYED, exempt=None)), None)
    assert step_thrice(make(**options), None) == published
    assert step_thrice(make(**options), (3, 4)) == published
    exempt = step_thrice(make(lr=0.02, trust=False), None)
    assert exempt != published
    assert step_thrice(make(**options), (SIZE,)) == step_thrice(make(**options), None, whole=True) == exempt


def test_a_shape_that_is_told_later_counts_from_then_on() -> None:
    optimizer, weights = LAMB(0.1), np.full(4, 8.0)
    optimizer.update("layer", weights, np.ones(4))
    assert optimizer.stats()["layer"]["trust_ratio"] == pytest.approx(8.0)
    optimizer.update("layer", weights, np.ones(4), shape=(4,))
    assert optimizer.stats()["layer"]["trust_ratio"] == 1.0


# ---- names, iterations, scales


class TestNames:
    def test_a_number_and_its_text_are_two_parameters(self) -> None:
        optimizer, first, second = LAMB(0.1), np.ones(3), np.ones((2, 2))
        optimizer.update(1, first, np.ones(3))
        optimizer.update("1", second, np.ones((2, 2)))
        optimizer.update(1, first, np.ones(3))
        assert optimizer.num_parameters == 2
        assert {name: int(entries["step"]) for name, entries in optimizer.state.items()} == {1: 2, "1": 1}

    def test_text_need_not_be_encodable(self) -> None:
        """As names that come from files may not be."""
        optimizer, params = LARS(0.1), {"a": np.ones(2), "\ud800": np.ones(2)}
        optimizer.step(params, {name: np.ones(2) for name in params})
        assert optimizer.num_parameters == 2

    @pytest.mark.parametrize("name", [None, 1.5, True, ("a",), b"a", np.array(1)], ids=repr)
    def test_other_names_are_refused(self, name: Any) -> None:
        optimizer, weights = LARS(0.1), np.ones(3)
        with refused(ParameterError, "name must be a string or a whole number", optimizer, weights):
            optimizer.update(name, weights, np.ones(3))

    @pytest.mark.parametrize(
        ("name", "same"),
        [
            pytest.param(np.int64(1), 1, id="numpy integer"),
            pytest.param(np.str_("a"), "a", id="numpy text"),
            pytest.param(IntEnum("Layer", {"FIRST": 1}).FIRST, 1, id="enumeration"),
        ],
    )
    def test_equal_names_are_one_parameter(self, name: Any, same: Any) -> None:
        first, second = np.ones((4, 3)), np.ones((4, 3))
        Kron(0.1, damping=0.5).update(name, first, np.eye(4, 3))
        Kron(0.1, damping=0.5).update(same, second, np.eye(4, 3))
        assert bits(first) == bits(second)


class TestIterations:
    @every_case
    def test_a_global_step_is_the_same_while_all_are_stepped_once(self, make: Make) -> None:
        """A whole model ends the iteration itself; by default ending one changes nothing."""
        single, whole, own = make(global_step=True), make(global_step=True), make()
        first, second, third = model(), model(), model()
        for step in gradients(4):
            for name, weights in first.items():
                single.update(name, weights, step[name], shape=weights.shape)
            single.end_iteration()
            whole.step(second, step)
            own.step(third, step)
            own.end_iteration()
        assert bits(first) == bits(second) == bits(third) != bits(model())
        assert bits(single.state) == bits(whole.state) == bits(own.state)
        assert single.iteration == whole.iteration == 4

    def test_a_step_that_fails_ends_nothing(self) -> None:
        optimizer = LARS(0.1, global_step=True, on_nonfinite="raise")
        for error, gradient in ((ParameterError, np.ones(3)), (NonFiniteError, np.full(2, np.nan))):
            with refused(error, "'w'", optimizer):
                optimizer.step({"w": np.ones(2)}, {"w": gradient})
        assert optimizer.iteration == 0

    @pytest.mark.parametrize(("global_step", "wanted"), [(True, [1, 1, 3]), (False, [1, 2, 1])])
    def test_schedules_see_the_step_of_all_parameters_or_of_each(self, global_step: bool, wanted: list[int]) -> None:
        seen: list[int] = []

        def lr(t: int) -> float:
            seen.append(t)
            return 0.1

        optimizer, a, b = LAMB(lr, global_step=global_step), np.ones(2), np.ones(2)
        seen.clear()
        optimizer.update("a", a, np.ones(2))
        optimizer.update("a", a, np.ones(2))
        optimizer.end_iteration()
        optimizer.end_iteration()
        optimizer.update("b", b, np.ones(2))
        assert seen == wanted
        assert {name: int(entries["step"]) for name, entries in optimizer.state.items()} == {
            "a": wanted[1],
            "b": wanted[2],
        }

    def test_the_global_step_enters_the_mathematics(self) -> None:
        late, fresh = np.ones(4), np.ones(4)
        optimizer = Adafactor(global_step=True)
        for _ in range(9999):
            optimizer.end_iteration()
        optimizer.update("late", late, np.ones(4))
        Adafactor().update("fresh", fresh, np.ones(4))
        # the relative step is min(1e-2, 1 / sqrt(t)); that of step 40,000 would be half as large
        assert bits(late) == bits(fresh)
        for _ in range(30_000):
            optimizer.end_iteration()
        optimizer.update("later", later := np.ones(4), np.ones(4))
        assert np.allclose(1 - later, (1 - fresh) / 2, atol=0, rtol=FLOAT32)


class TestScales:
    @cases_with_lr
    def test_argument_entry_and_method_multiply(self, make: Make) -> None:
        class Scaled(type(make())):
            def lr_scale(self, name: str | int) -> float:
                assert name == NAME
                return 0.5

        scaled, direct = model()[NAME], model()[NAME]
        options = {**make.keywords, "overrides": [("encoder.*", dict(lr_scale=0.25))]}
        first, second = Scaled(**options), make(lr=make.keywords["lr"] / 32)
        for step in gradients(3):
            first.update(NAME, scaled, step[NAME], lr_scale=0.25)
            second.update(NAME, direct, step[NAME])
        assert bits(scaled) == bits(direct) != bits(model()[NAME])

    @pytest.mark.parametrize("value", [-1.0, np.nan, np.inf, "a", None, True, [0.5]], ids=repr)
    def test_a_scale_that_is_out_of_range_or_no_number_is_refused(self, value: Any) -> None:
        optimizer, weights = LARS(0.1), np.ones(3)
        with refused(OptionError, "lr_scale must be a finite number >= 0", optimizer, weights):
            optimizer.update(NAME, weights, np.ones(3), lr_scale=value)

    @pytest.mark.parametrize("answer", [None, -1.0])
    def test_a_method_that_answers_with_no_scale_is_told_so(self, answer: Any) -> None:
        """Negative ones do not cancel."""

        class Wrong(LARS):
            def lr_scale(self, name: str | int) -> Any:
                return answer

        optimizer, weights = Wrong(0.1), np.ones(3)
        with refused(OptionError, r"lr_scale\(name\) must be a finite number >= 0, got", optimizer, weights):
            optimizer.update(NAME, weights, np.ones(3))
        with refused(OptionError, "lr_scale must be|lr_scale\\(name\\) must be", optimizer, weights):
            optimizer.update(NAME, weights, np.ones(3), lr_scale=-1.0)
