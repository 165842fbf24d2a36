"""A whole model is stepped at once, as its arrays would be one by one."""

from __future__ import annotations

from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from raw_arrays import Make, bits, every_case, fingerprint, gradients, model, refused, train, two_cases

from thalweg.errors import OptionError, ParameterError
from thalweg.numpy import LAMB, LARS

NAMES = list(model())


@two_cases
def test_a_sequence_equals_numbered_parameters(make: Make) -> None:
    whole, single = make(), make()
    first, second = tuple(model().values()), list(model().values())
    for step in gradients(3):
        whole.step(first, list(step.values()))
        for index, name in enumerate(NAMES):
            single.update(index, second[index], step[name], shape=second[index].shape)
    assert bits(first) == bits(second) != bits(list(model().values()))
    assert fingerprint(whole) == fingerprint(single)
    assert list(whole.state) == [0, 1, 2, 3, 4]
    other = make()
    other.step(first, [None, *(np.ones_like(p) for p in first[1:])])
    assert list(other.state) == [1, 2, 3, 4]


@every_case
def test_parameters_without_a_gradient_are_left_alone(make: Make) -> None:
    """None, or no entry at all; and their steps are not counted."""
    optimizer, params, (one, two, three) = make(), model(), gradients(3)
    optimizer.step(params, {**one, "conv": None})
    del two["conv"]
    optimizer.step(params, two)
    assert bits(params["conv"]) == bits(model()["conv"])
    assert "conv" not in optimizer.state
    optimizer.step(params, three)
    assert {name: int(entries["step"]) for name, entries in optimizer.state.items()} == {
        name: 1 if name == "conv" else 3 for name in NAMES
    }
    alone, twin = make(), model()
    alone.update("conv", twin["conv"], three["conv"])
    assert bits(twin["conv"]) == bits(params["conv"])


def test_an_empty_model_is_a_model() -> None:
    optimizer = LARS(0.1)
    optimizer.step({}, {})
    optimizer.step([], [])
    assert optimizer.num_parameters == 0


@pytest.mark.parametrize("kind", [OrderedDict, MappingProxyType])
def test_any_mapping_will_do(kind: type) -> None:
    first, second = train(LAMB(0.1), model(), gradients(2)), model()
    train(LAMB(0.1), kind(second), [kind(step) for step in gradients(2)])
    assert bits(first) == bits(second)


def test_a_schedule_that_fails_for_one_changes_none() -> None:
    optimizer, a, b = LAMB(lambda t: 0.1 if t < 2 else -1.0), np.ones(2), np.ones(2)
    optimizer.update("b", b, np.ones(2))
    arrays = {"a": a, "b": b}
    with refused(OptionError, "parameter 'b', step 2: lr must be", optimizer, arrays):
        optimizer.step(arrays, {"a": np.ones(2), "b": np.ones(2)})


class TestMemory:
    @pytest.mark.parametrize(
        "second",
        [
            pytest.param(lambda x: x[:4], id="the array itself"),
            pytest.param(lambda x: x[:4].reshape(2, 2), id="in another shape"),
            pytest.param(lambda x: x[:2], id="its beginning"),
            pytest.param(lambda x: x[2:], id="its end, and more"),
        ],
    )
    def test_two_names_for_the_same_memory_are_refused(self, second: Any) -> None:
        optimizer, x = LARS(0.1), np.ones(6)
        params = {"a": x[:4], "b": second(x)}
        with refused(ParameterError, "'a' and 'b' share memory|'b' and 'a' share memory", optimizer, params):
            optimizer.step(params, {name: np.ones(p.shape) for name, p in params.items()})

    def test_empty_arrays_share_nothing(self) -> None:
        x = np.ones(4)
        optimizer = LARS(0.1)
        optimizer.step({"a": x[:0], "b": x, "c": x[:0]}, {"a": np.ones(0), "b": np.ones(4), "c": np.ones(0)})
        assert optimizer.num_parameters == 3

    @pytest.mark.parametrize("on_nonfinite", ["propagate", "skip", "raise"])
    @pytest.mark.parametrize("order", ["xy", "yx"])
    def test_gradients_may_be_the_parameters_themselves(self, order: str, on_nonfinite: str) -> None:
        """As those of the sum of x * y are."""
        arrays = {"x": np.full(3, 1.0), "y": np.full(3, 2.0)}
        optimizer = LARS(0.1, trust=False, on_nonfinite=on_nonfinite)
        optimizer.step({name: arrays[name] for name in order}, {"x": arrays["y"], "y": arrays["x"]})
        assert (arrays["x"] == 1.0 - 0.1 * 2.0).all()
        assert (arrays["y"] == 2.0 - 0.1 * 1.0).all()

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize(
        "view", [lambda x: x[2:5], lambda x: x[5:2:-1], lambda x: x[::3][:3], lambda x: np.broadcast_to(x[4], 3)]
    )
    def test_or_parts_of_them(self, view: Any, turned: bool) -> None:
        """Of a buffer that holds two parameters, across the border between them."""
        buffer = np.arange(1.0, 9.0)
        params = {"a": buffer[:4], "b": buffer[4:], "c": np.ones(3)}
        wanted = {"a": buffer[:4] - 0.1, "b": buffer[4:] - 0.1, "c": np.ones(3) - 0.1 * view(buffer)}
        names = list(params)[::-1] if turned else list(params)
        grads = {"a": np.ones(4), "b": np.ones(4), "c": view(buffer)}
        LARS(0.1, trust=False).step({name: params[name] for name in names}, grads)
        assert bits(params) == bits(wanted)


def test_figures_of_the_last_step_can_be_read() -> None:
    optimizer, weights = LARS(2.0, trust_coefficient=0.1), np.array([3.0, 4.0])
    optimizer.step({"w": weights}, {"w": np.array([6.0, 8.0])})
    assert optimizer.stats() == {"w": {"trust_ratio": 0.05, "param_norm": 5.0, "grad_norm": 10.0}}


def test_figures_of_stacked_parameters_come_by_slice() -> None:
    optimizer, weights = LARS(2.0, trust_coefficient=0.1, stacked_axes=1), np.array([[3.0, 4.0], [6.0, 8.0]])
    optimizer.step({"w": weights}, {"w": np.array([[6.0, 8.0], [6.0, 8.0]])})
    assert optimizer.stats()["w"]["param_norm"].tolist() == [5.0, 10.0]
