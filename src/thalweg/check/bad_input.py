"""Bad input: an error that says something, and nothing half-changed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

from thalweg.check import expect
from thalweg.check.problem import TorchSubject, draw, give, require_option, train, weights

WRONG = (ValueError, TypeError)


def assert_values_refused(s: TorchSubject, option: str, *wrong: Any) -> None:
    """Fail unless values out of an option's range are refused: numbers where it has one, tuples where it has some."""
    require_option(made := s.make(s.weights()), option)
    now = made.param_groups[0][option]
    for value in wrong:
        if isinstance(value, tuple) == isinstance(now, (tuple, list)):
            value = (*value, *now[len(value) :]) if isinstance(value, tuple) else value  # of as many numbers
            expect.refused(partial(s.make, s.weights(), **{option: value}), f"{option}={value}")


def test_lr_out_of_range(s: TorchSubject) -> None:
    """Values of lr such as -0.1 are refused, with a word."""
    assert_values_refused(s, "lr", -0.1, float("nan"))


def test_weight_decay_out_of_range(s: TorchSubject) -> None:
    """Values of weight_decay such as -0.1 are refused, with a word."""
    assert_values_refused(s, "weight_decay", -0.1)


def test_betas_out_of_range(s: TorchSubject) -> None:
    """Values of betas such as (1.5, 0.9) are refused, with a word."""
    assert_values_refused(s, "betas", (1.5, 0.9), (0.9, -0.1), (1.0, 0.0), (0.0, 1.0))


def test_momentum_out_of_range(s: TorchSubject) -> None:
    """Values of momentum such as -0.5 are refused, with a word."""
    assert_values_refused(s, "momentum", -0.5)


def test_eps_out_of_range(s: TorchSubject) -> None:
    """Values of eps such as -1.0 are refused, with a word."""
    assert_values_refused(s, "eps", -1.0, (-1.0, -1.0))


def test_no_parameters(s: TorchSubject) -> None:
    """An empty list of parameters is refused: most often a model was filtered to nothing."""
    expect.refused(lambda: s.make([]), "an empty list", WRONG)


def test_no_tensors(s: TorchSubject) -> None:
    """What is no tensor is refused."""
    expect.refused(lambda: s.make([1.0, "weight"]), "numbers and texts as parameters", WRONG)


def test_sets_of_parameters(s: TorchSubject) -> None:
    """A set of parameters is refused: its order differs between processes, and state goes by it."""
    expect.refused(lambda: s.make([{"params": set(s.weights())}]), "a group with a set", (TypeError,))


def test_no_leaves(s: TorchSubject) -> None:
    """A tensor that was computed is refused: stepping it changes no parameter."""
    expect.refused(lambda: s.make([s.weights()[0] * 2]), "a tensor that is no leaf", WRONG)


def test_lr_of_a_group_out_of_range(s: TorchSubject) -> None:
    """A negative lr of a group is refused, as that of all is."""
    expect.refused(lambda: s.make([{"params": s.weights(), "lr": -0.1}]), "a group with lr=-0.1")


def test_misspelt_option(s: TorchSubject) -> None:
    """An option that does not exist is refused: a typing mistake must not train with defaults."""
    expect.refused(lambda: s.make(s.weights(), weight_decya=0.1), "weight_decya=0.1")


def test_bad_group_is_not_added(s: TorchSubject) -> None:
    """When add_param_group refuses a group, the optimizer is as before."""
    params, optimizer = s.begin()
    number = len(optimizer.param_groups)
    for wrong in ({"params": params[:1]}, {"params": [torch.ones(2) * params[0].sum()]}):
        expect.refused(partial(optimizer.add_param_group, wrong), "a parameter that is there, or no leaf", WRONG)
    if len(optimizer.param_groups) != number:
        pytest.fail(f"there are {len(optimizer.param_groups)} groups after a group was refused, and were {number}")
    expect.usual(s, train(optimizer, params, 1, first=3), 4, "after a group was refused")


def test_failing_closure(s: TorchSubject) -> None:
    """An error in a closure comes out, and parameters and state are as before."""
    params, optimizer = s.begin()

    def closure() -> float:
        raise KeyError("from the closure")

    give(params, 3)
    expect.refused(lambda: optimizer.step(closure), "an error in the closure", (KeyError,))
    expect.usual(s, params, 3, "after an error in the closure")
    expect.usual(s, train(optimizer, params, 1, first=3), 4, "one step after an error in the closure")


def test_failed_step_changes_nothing(s: TorchSubject) -> None:
    """A step that fails at the last parameter has not written the first: the run can go on."""
    shapes = [(6, 4), (6, 4), (5, 6)]
    params, optimizer = s.make_fresh(shapes=shapes)
    train(optimizer, params, 2)
    give(params, 2)
    params[2].grad = draw((5, 6), 1).float().to_sparse()
    try:
        optimizer.step()
    except Exception:
        expect.usual(s, params, 2, "after a step that failed", shapes=shapes)
        expect.usual(s, train(optimizer, params, 1, first=2), 3, "one step after a step that failed", shapes=shapes)
        return
    pytest.skip("sparse gradients are taken: no step fails here")


def test_torch_error_inputs(s: TorchSubject) -> None:
    """Inputs that every optimizer of torch refuses are refused; it warns of a parameter that a group has twice."""
    first, second = weights([(1, 1), (1, 1)])
    inputs: list[tuple[str, Any, dict[str, Any]]] = [
        ("a tensor in place of a list of them", first, {}),
        ("a name for one parameter of two", [("weight", first), second], {}),
        ("names in one group of two", [{"params": [first]}, {"params": [("weight", second)]}], {}),
        ("lr as a tensor of two numbers", [first, second], {"lr": torch.tensor([0.001, 0.001])}),
    ]
    for what, params, options in inputs:
        expect.refused(partial(s.make, params, **options), what)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            s.make([first, first])
        except (ValueError, TypeError):
            return
    if not any(issubclass(warning.category, UserWarning) for warning in told):
        pytest.fail("a parameter twice in a group: no warning")
