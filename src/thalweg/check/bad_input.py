"""Bad input: an error that says something, and nothing half-changed."""

from __future__ import annotations

import ast
import importlib.util
import warnings
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from thalweg.check.problem import TorchSubject, assert_refused, assert_usual, draw, give, require_option, train
from thalweg.check.registry import Failed, NotOffered, holds

WRONG = (ValueError, TypeError)


#: Values that a constructor must refuse, where it has the option.
OUT_OF_RANGE: dict[str, tuple[Any, ...]] = {
    "lr": (-0.1, float("nan")),
    "weight_decay": (-0.1,),
    "betas": ((1.5, 0.9), (0.9, -0.1)),
    "momentum": (-0.5,),
    "eps": (-1.0, (-1.0, -1.0)),
}


def register_range_check(option: str) -> None:
    """Register the check that values out of an option's range are refused."""

    def out_of_range(s: TorchSubject) -> None:
        require_option(made := s.make(s.weights()), option)
        now = made.param_groups[0][option]
        for value in OUT_OF_RANGE[option]:
            if isinstance(value, tuple) == isinstance(now, (tuple, list)):
                value = (*value, *now[len(value) :]) if isinstance(value, tuple) else value  # of as many numbers
                assert_refused(partial(s.make, s.weights(), **{option: value}), f"{option}={value}")

    out_of_range.__name__ = f"{option}_out_of_range"
    out_of_range.__doc__ = f"Values of {option} such as {OUT_OF_RANGE[option][0]} are refused, with a word."
    holds("bad input")(out_of_range)


for each in OUT_OF_RANGE:
    register_range_check(each)


@holds("bad input")
def no_parameters(s: TorchSubject) -> None:
    """An empty list of parameters is refused: most often a model was filtered to nothing."""
    assert_refused(lambda: s.make([]), "an empty list", WRONG)


@holds("bad input")
def no_tensors(s: TorchSubject) -> None:
    """What is no tensor is refused."""
    assert_refused(lambda: s.make([1.0, "weight"]), "numbers and texts as parameters", WRONG)


@holds("bad input")
def sets_of_parameters(s: TorchSubject) -> None:
    """A set of parameters is refused: its order differs between processes, and state goes by it."""
    assert_refused(lambda: s.make([{"params": set(s.weights())}]), "a group with a set", (TypeError,))


@holds("bad input")
def no_leaves(s: TorchSubject) -> None:
    """A tensor that was computed is refused: stepping it changes no parameter."""
    assert_refused(lambda: s.make([s.weights()[0] * 2]), "a tensor that is no leaf", WRONG)


@holds("bad input")
def lr_of_a_group_out_of_range(s: TorchSubject) -> None:
    """A negative lr of a group is refused, as that of all is."""
    assert_refused(lambda: s.make([{"params": s.weights(), "lr": -0.1}]), "a group with lr=-0.1")


@holds("bad input")
def misspelt_option(s: TorchSubject) -> None:
    """An option that does not exist is refused: a typing mistake must not train with defaults."""
    assert_refused(lambda: s.make(s.weights(), weight_decya=0.1), "weight_decya=0.1")


@holds("bad input")
def bad_group_is_not_added(s: TorchSubject) -> None:
    """When add_param_group refuses a group, the optimizer is as before."""
    params, optimizer = s.begin()
    number = len(optimizer.param_groups)
    for wrong in ({"params": params[:1]}, {"params": [torch.ones(2) * params[0].sum()]}):
        assert_refused(partial(optimizer.add_param_group, wrong), "a parameter that is there, or no leaf", WRONG)
    if len(optimizer.param_groups) != number:
        raise Failed(f"there are {len(optimizer.param_groups)} groups after a group was refused, and were {number}")
    assert_usual(s, train(optimizer, params, 1, first=3), 4, "after a group was refused")


@holds("bad input")
def failing_closure(s: TorchSubject) -> None:
    """An error in a closure comes out, and parameters and state are as before."""
    params, optimizer = s.begin()

    def closure() -> float:
        raise KeyError("from the closure")

    give(params, 3)
    assert_refused(lambda: optimizer.step(closure), "an error in the closure", (KeyError,))
    assert_usual(s, params, 3, "after an error in the closure")
    assert_usual(s, train(optimizer, params, 1, first=3), 4, "one step after an error in the closure")


@holds("bad input")
def failed_step_changes_nothing(s: TorchSubject) -> None:
    """A step that fails at the last parameter has not written the first: the run can go on."""
    shapes = [(6, 4), (6, 4), (5, 6)]
    params, optimizer = s.make_fresh(shapes=shapes)
    train(optimizer, params, 2)
    give(params, 2)
    params[2].grad = draw((5, 6), 1).float().to_sparse()
    try:
        optimizer.step()
    except Exception:
        assert_usual(s, params, 2, "after a step that failed", shapes=shapes)
        assert_usual(s, train(optimizer, params, 1, first=2), 3, "one step after a step that failed", shapes=shapes)
        return
    raise NotOffered("sparse gradients are taken: no step fails here")


# ---- the table of inputs that torch's own tests are made from

TABLE = "torch.testing._internal.common_optimizers"
#: What the rows for all optimizers are made by, and how the functions for each are called.
FOR_ALL, FOR_EACH = "get_error_inputs_for_all_optims", "optim_error_inputs_func_"
#: Options that mean the same wherever they occur. Others are looked at in torch's own optimizers only.
EVERYWHERE = {"lr", "weight_decay", "betas", "momentum", "eps"}


def load_table() -> dict[str, Callable[..., list[Any]]]:
    """The functions that make the rows, by their names.

    Only they are taken from the file: importing it takes ten seconds, needs other packages, and changes settings of
    the whole process.
    """
    found = importlib.util.find_spec(TABLE)
    if found is None or found.origin is None:
        raise NotOffered("this torch has no table of error inputs")
    tree = ast.parse(Path(found.origin).read_text("utf-8"))
    tree.body = [node for node in tree.body if is_needed(node)]
    inside: dict[str, Any] = {"torch": torch, "Parameter": Parameter, "Enum": Enum, "Any": Any}
    inside["_get_device_type"] = lambda device: torch.device(device).type
    exec(compile(tree, found.origin, "exec"), inside)
    return inside


def is_needed(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name in ("OptimizerInput", "OptimizerErrorEnum", "ErrorOptimizerInput")
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CUDA_CONFIG_GPUS"
    return isinstance(node, ast.FunctionDef) and (node.name == FOR_ALL or node.name.startswith(FOR_EACH))


def rows(s: TorchSubject) -> tuple[list[Any], list[Any]]:
    """The rows for all optimizers, and those about options that the subject has."""
    try:
        inside = load_table()
        for_all = inside[FOR_ALL]("cpu", torch.float32)
        each = {name: make("cpu", torch.float32) for name, make in inside.items() if name.startswith(FOR_EACH)}
    except NotOffered:
        raise
    except Exception as error:
        raise NotOffered(f"torch's table of error inputs is another here: {type(error).__name__}") from error
    is_torchs = str(getattr(s.factory, "__module__", "")).startswith("torch.optim.")
    own = each.pop(f"{FOR_EACH}{s.factory.__name__.lower()}", []) if is_torchs else []
    options = s.make(s.weights()).param_groups[0]
    found = [row for row in own[len(for_all) :] if row.optimizer_error_input.params is None]
    others = [row for rows in each.values() for row in rows[len(for_all) :]]
    return for_all, [*found, *(row for row in others if is_about(row.optimizer_error_input, options))]


def is_about(row: Any, options: dict[str, Any]) -> bool:
    """Whether another optimizer's row is about common options that this one has, in the form in which it has them."""
    return row.params is None and all(
        key in EVERYWHERE
        and key in options
        and is_plain(value)
        and isinstance(value, tuple) == isinstance(options[key], tuple)
        for key, value in row.kwargs.items()
    )


def is_plain(value: Any) -> bool:
    return all(isinstance(part, (int, float)) for part in (value if isinstance(value, tuple) else (value,)))


@holds("bad input")
def torch_error_inputs(s: TorchSubject) -> None:
    """Inputs that every optimizer of torch must refuse, by its own table, are refused."""
    for row in rows(s)[0]:
        given = row.optimizer_error_input
        params = s.weights() if given.params is None else given.params
        make = partial(s.make, params, **given.kwargs)
        if not issubclass(row.error_type, Warning):
            assert_refused(make, given.desc)
            continue
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                make()
            except Exception:
                continue
        if not any(issubclass(each.category, row.error_type) for each in told):
            raise Failed(f"{given.desc}: no warning")


@holds("bad input")
def torch_error_options(s: TorchSubject) -> None:
    """Options that torch's table has errors for are refused, where the optimizer has them too."""
    found = rows(s)[1]
    if not found:
        raise NotOffered("none of its options is in the table")
    for row in found:
        given = row.optimizer_error_input
        assert_refused(partial(s.make, s.weights(), **given.kwargs), f"{given.kwargs} ({given.desc})")
