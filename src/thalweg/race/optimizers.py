"""Contestants as optimizers: of a model in torch, or of arrays, which optimizers of torch step through tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant
from thalweg.race.task import Array, Run, Task, blame

Gradients: TypeAlias = Mapping[str, Array | None]
Step: TypeAlias = Callable[[int, Gradients], None]


def name_in(task: Task, contestant: Contestant) -> str:
    """A contestant and its task, as error messages name them."""
    return f"task {task.name!r}, {contestant.name}"


def make_for_model(contestant: Contestant, model: Any, task: Task, run: Run) -> Any:
    """An optimizer of torch for a model."""
    torch: Any = importlib.import_module("torch")
    who, make, target = name_in(task, contestant), contestant.make, model
    if contestant.rule is not None:
        make, target = (
            importlib.import_module("thalweg.torch").optimizer(contestant.rule),
            list(model.named_parameters()),
        )
    assert make is not None
    engine = {} if run.engine == "auto" else {"engine": run.engine}
    with blame(who, f"making it with lr={run.lr:g}"):
        made = make(target, lr=run.lr, **engine, **contestant.options)
    if not isinstance(made, torch.optim.Optimizer):
        raise CommandError(f"{who}: it returned a {type(made).__name__}, and must return an optimizer of torch")
    if any("lr" not in group for group in made.param_groups):
        raise CommandError(f"{who}: it has no lr in its groups, and the race must lower it step by step")
    return made


def follow_schedule(optimizer: Any, task: Task, run: Run) -> Callable[[int], None]:
    """What sets the rates of an optimizer of torch for a step; groups with rates of their own keep their proportion."""
    shares = [float(group["lr"]) / run.lr for group in optimizer.param_groups]

    def set_rate(step: int) -> None:
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            rate = task.rate_at(run, step) * share
            if hasattr(group["lr"], "fill_"):  # a tensor, which others may hold
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    return set_rate


def make_for_arrays(contestant: Contestant, params: Mapping[str, Array], task: Task, run: Run) -> tuple[Any, Step]:
    """An optimizer for arrays of numpy, and what steps them, for the number of the step and the gradients.

    One that is written for torch steps tensors that share the memory of the arrays.
    """
    who = name_in(task, contestant)
    if contestant.rule is not None:
        with blame(who, "making it"):
            make = importlib.import_module("thalweg.numpy").optimizer(contestant.rule)
            ours = make(lr=partial(task.rate_at, run), engine=run.engine, **contestant.options)
        return ours, lambda number, gradients: ours.step(params, gradients)
    torch: Any = importlib.import_module("torch")
    with blame(who, "making a model of the arrays"):
        model = make_model(params)
    tensors = {name: model.get_parameter(str(name)) for name in params}
    theirs = make_for_model(contestant, model, task, run)
    set_rate = follow_schedule(theirs, task, run)

    def step(number: int, gradients: Gradients) -> None:
        set_rate(number)
        if unknown := gradients.keys() - tensors.keys():
            raise CommandError(f"{who}: there is a gradient of {unknown}, and no such parameter")
        for name, p in tensors.items():
            gradient = gradients.get(name)
            p.grad = None if gradient is None else torch.as_tensor(gradient.copy(), dtype=p.dtype)
        with blame(who, "step()"):
            theirs.step()
        for name, p in tensors.items():  # which it may have replaced instead of written to
            np.copyto(params[name], p.detach().numpy())

    return theirs, step


def make_model(params: Mapping[str, Array]) -> Any:
    """A model whose modules follow the dots in the names; a ``weight`` of two axes is that of a linear layer."""
    torch: Any = importlib.import_module("torch")
    layer = type("Linear", (torch.nn.Module,), {})  # mixtures tell linear layers by the name of their class
    model = torch.nn.Module()
    for name, array in params.items():
        *path, last = str(name).split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, layer())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.from_numpy(array)))
    return model
