"""torch's own table of inputs that optimizers must refuse, which its tests are made from."""

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

from thalweg.check.problem import assert_refused, weights
from thalweg.check.registry import Failed, NotOffered, holds
from thalweg.check.subject import Subject

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


def rows(s: Subject) -> tuple[list[Any], list[Any]]:
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
    options = s.make(weights(s)).param_groups[0]
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
def torch_error_inputs(s: Subject) -> None:
    """Inputs that every optimizer of torch must refuse, by its own table, are refused."""
    for row in rows(s)[0]:
        given = row.optimizer_error_input
        params = weights(s) if given.params is None else given.params
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
def torch_error_options(s: Subject) -> None:
    """Options that torch's table has errors for are refused, where the optimizer has them too."""
    found = rows(s)[1]
    if not found:
        raise NotOffered("none of its options is in the table")
    for row in found:
        given = row.optimizer_error_input
        assert_refused(partial(s.make, weights(s), **given.kwargs), f"{given.kwargs} ({given.desc})")
