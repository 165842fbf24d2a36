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
    found = {name: (int(entries["step"]), entries["exp_avg"].shape) for name, entries in optimizer.state.items()}
    assert found == {"list": (2, (2, 3)), "number": (1, ()), "integers": (1, (3, 2))}


WHOLE = "shape must be a tuple of whole numbers >= 0"
#: Shapes of a parameter and of its gradient, the shape that is told, and what is said of it.
SHAPES: list[tuple[Any, Any, Any, str]] = [
    (12, 12, (3, 5), r"encoder.0.weight.*\(3, 5\).*flat with 15 elements"),
    (12, 12, (2, 2), r"encoder.0.weight.*\(2, 2\).*flat with 4 elements"),
    *((12, 12, shape, WHOLE) for shape in ((-1, 3), (2.0, 6), 12, "12")),
    # a transposed array has as many elements, and other numbers in every place
    ((4, 3), (3, 4), (3, 4), r"encoder.0.weight.*\(4, 3\).*must be flat"),
    ((4, 3), (3, 4), (4, 3), r"gradient of 'encoder.0.weight'.*must be flat"),
]


@pytest.mark.parametrize(("of_weights", "of_gradient", "shape", "said"), SHAPES)
def test_a_shape_that_does_not_fit_is_refused(of_weights: Any, of_gradient: Any, shape: Any, said: str) -> None:
    optimizer, weights, gradient = LARS(0.1), np.ones(of_weights), np.ones(of_gradient)
    with refused(ParameterError, said, optimizer, weights, gradient):
        optimizer.update(NAME, weights, gradient, shape=shape)


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


# ---- buffers whose shape nobody has told: they are exempted from nothing


def step_thrice(optimizer: Any, shape: tuple[int, ...] | None, whole: bool = False) -> Any:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(12).astype(np.float32)
    for t in range(3):
        gradient = (rng.standard_normal(12) * (1 + t)).astype(np.float32)
        if whole:
            optimizer.step({"layer": weights}, {"layer": gradient})
        else:
            optimizer.update("layer", weights, gradient, shape=shape)
    return bits(weights)


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_a_buffer_has_the_rule_of_matrices_unless_it_was_declared_a_vector(make: Any) -> None:
    """With a shape, or as an array of a whole model: there it is a bias, without decay and trust ratio."""
    options: dict[str, Any] = dict(lr=0.02, weight_decay=0.1, exempt="vectors")
    published = step_thrice(make(**{**options, "exempt": None}), None)
    assert step_thrice(make(**options), None) == step_thrice(make(**options), (3, 4)) == published
    exempt = step_thrice(make(lr=0.02, trust=False), None)
    assert exempt != published
    assert step_thrice(make(**options), (12,)) == step_thrice(make(**options), None, whole=True) == exempt


def test_a_shape_that_is_told_later_counts_from_then_on() -> None:
    optimizer, weights = LAMB(0.1), np.full(4, 8.0)
    optimizer.update("layer", weights, np.ones(4))
    assert optimizer.stats()["layer"]["trust_ratio"] == pytest.approx(8.0)
    optimizer.update("layer", weights, np.ones(4), shape=(4,))
    assert optimizer.stats()["layer"]["trust_ratio"] == 1.0


# ---- names


def test_a_number_and_its_text_are_two_parameters() -> None:
    """Text need not be encodable, as names that come from files may not be."""
    optimizer = LAMB(0.1)
    for name in (1, "1", 1, "\ud800"):
        optimizer.update(name, np.ones(3), np.ones(3))
    assert {name: int(entries["step"]) for name, entries in optimizer.state.items()} == {1: 2, "1": 1, "\ud800": 1}


def test_equal_names_are_one_parameter_and_other_names_seeds_and_steps_have_noise_of_their_own() -> None:
    def drawn(name: Any, seed: int = 0, before: int = 0) -> Any:
        optimizer, weights = Kron(0.1, damping=0.5, momentum=0.0, seed=seed, global_step=True), np.ones((4, 3))
        for _ in range(before):
            optimizer.end_iteration()
        optimizer.update(name, weights, np.eye(4, 3))
        return bits(weights)

    assert drawn(np.int64(1)) == drawn(1) == drawn(IntEnum("Layer", {"FIRST": 1}).FIRST)
    assert drawn(np.str_("1")) == drawn("1")
    assert len({drawn("1"), drawn(1), drawn("2"), drawn("1", seed=1), drawn("1", before=1)}) == 5


@pytest.mark.parametrize("name", [None, 1.5, True, ("a",), b"a", np.array(1)], ids=repr)
def test_other_names_are_refused(name: Any) -> None:
    optimizer, weights = LARS(0.1), np.ones(3)
    with refused(ParameterError, "name must be a string or a whole number", optimizer, weights):
        optimizer.update(name, weights, np.ones(3))


# ---- iterations


@every_case
def test_a_global_step_is_the_same_while_all_are_stepped_once(make: Make) -> None:
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


def test_a_step_that_fails_ends_nothing() -> None:
    optimizer = LARS(0.1, global_step=True, on_nonfinite="raise")
    for error, gradient in ((ParameterError, np.ones(3)), (NonFiniteError, np.full(2, np.nan))):
        with refused(error, "'w'", optimizer):
            optimizer.step({"w": np.ones(2)}, {"w": gradient})
    assert optimizer.iteration == 0


@pytest.mark.parametrize(("global_step", "wanted"), [(True, [1, 1, 3]), (False, [1, 2, 1])])
def test_schedules_see_the_step_of_all_parameters_or_of_each(global_step: bool, wanted: list[int]) -> None:
    seen: list[int] = []
    optimizer, a, b = LAMB(lambda t: seen.append(t) or 0.1, global_step=global_step), np.ones(2), np.ones(2)
    seen.clear()
    optimizer.update("a", a, np.ones(2))
    optimizer.update("a", a, np.ones(2))
    optimizer.end_iteration()
    optimizer.end_iteration()
    optimizer.update("b", b, np.ones(2))
    assert seen == wanted
    assert [int(optimizer.state[name]["step"]) for name in "ab"] == wanted[1:]


def test_the_global_step_enters_the_mathematics() -> None:
    late, later, fresh = np.ones(4), np.ones(4), np.ones(4)
    optimizer = Adafactor(global_step=True)
    for _ in range(9999):
        optimizer.end_iteration()
    optimizer.update("late", late, np.ones(4))
    Adafactor().update("fresh", fresh, np.ones(4))
    # the relative step is min(1e-2, 1 / sqrt(t)); that of step 40,000 is half as large
    assert bits(late) == bits(fresh)
    for _ in range(30_000):
        optimizer.end_iteration()
    optimizer.update("later", later, np.ones(4))
    assert np.allclose(1 - later, (1 - fresh) / 2, atol=0, rtol=FLOAT32)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_global_step_is_true_or_false(value: Any) -> None:
    with pytest.raises(OptionError, match="global_step must be True or False"):
        LARS(0.1, global_step=value)
    with pytest.raises(OptionError, match="global_step must be True or False"):
        LARS(0.1).with_global_step(value)


# ---- scales


@cases_with_lr
def test_scales_by_argument_entry_and_method_multiply(make: Make) -> None:
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
def test_a_scale_that_is_out_of_range_or_no_number_is_refused(value: Any) -> None:
    """Also where a method answers with it."""

    class Wrong(LARS):
        def lr_scale(self, name: str | int) -> Any:
            return value

    optimizer, wrong, weights = LARS(0.1), Wrong(0.1), np.ones(3)
    with refused(OptionError, "lr_scale must be a finite number >= 0", optimizer, weights):
        optimizer.update(NAME, weights, np.ones(3), lr_scale=value)
    with refused(OptionError, r"lr_scale\(name\) must be a finite number >= 0, got", wrong, weights):
        wrong.step({NAME: weights}, {NAME: np.ones(3)})
    with refused(OptionError, r"lr_scale( |\(name\) )must be", wrong, weights):  # two that are negative do not cancel
        wrong.update(NAME, weights, np.ones(3), lr_scale=-1.0)
