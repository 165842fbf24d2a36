"""Contestants as optimizers: of a model in torch, or of arrays, which optimizers of torch step through tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant
from thalweg.race.task import Array, Run, Task, blame


def name_in(task: Task, contestant: Contestant) -> str:
    """A contestant and its task, as error messages name them."""
    path = contestant.path or contestant.name
    return f"task {task.name!r}, {contestant.name}{'' if contestant.name == path else f' ({path})'}"


def make_for_model(contestant: Contestant, model: Any, task: Task, run: Run) -> Any:
    """An optimizer of torch for a model."""
    torch: Any = importlib.import_module("torch")
    who, make, params = name_in(task, contestant), contestant.make, list(model.named_parameters())
    engine = {} if run.engine == "auto" else {"engine": run.engine}
    if contestant.rule is not None:
        make, target = importlib.import_module("thalweg.torch").optimizer(contestant.rule), params
    elif contestant.takes == "params":
        target, engine = [p for _, p in params], {}
    else:
        target = model
    assert make is not None
    with blame(who, f"making it with lr={run.lr:g}"):
        made = make(target, lr=run.lr, **engine, **contestant.options)
    if not isinstance(made, torch.optim.Optimizer):
        raise CommandError(f"{who}: it returned a {type(made).__name__}, and must return an optimizer of torch")
    if any("lr" not in group for group in made.param_groups):
        raise CommandError(f"{who}: it has no lr in its groups, and the race must lower it step by step")
    return made


def make_for_arrays(contestant: Contestant, params: Mapping[str, Array], task: Task, run: Run) -> Any:
    """An optimizer for arrays of numpy; those that are written for torch step tensors that share their memory."""
    if contestant.rule is None:
        return ThroughTorch(contestant, params, task, run)
    with blame(name_in(task, contestant), "making it"):
        make = importlib.import_module("thalweg.numpy").optimizer(contestant.rule)
        return make(lr=partial(task.rate_at, run), engine=run.engine, **contestant.options)


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


class ThroughTorch:
    """Arrays stepped by an optimizer of torch, as the parameters of a model that share their memory."""

    def __init__(self, contestant: Contestant, params: Mapping[str, Array], task: Task, run: Run) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.who = name_in(task, contestant)
        with blame(self.who, "making a model of the arrays"):
            model = self.make_model(params)
        self.tensors = {name: model.get_parameter(str(name)) for name in params}
        self.optimizer = make_for_model(contestant, model, task, run)
        self.set_rate, self.steps = follow_schedule(self.optimizer, task, run), 0
        self.engine = getattr(self.optimizer, "engine", "torch")
        if hasattr(self.optimizer, "averaged"):
            self.averaged = lambda params: self.optimizer.averaged()

    def make_model(self, params: Mapping[str, Array]) -> Any:
        """A model whose modules follow the dots in the names; a ``weight`` of two axes is that of a linear layer."""
        nn = self.torch.nn
        layer = type("Linear", (nn.Module,), {})  # mixtures tell linear layers by the name of their class
        model = nn.Module()
        for name, array in params.items():
            *path, last = str(name).split(".")
            module = model
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, layer())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(self.torch.from_numpy(array)))
        return model

    def step(self, params: Mapping[str, Array], gradients: Mapping[str, Array | None]) -> None:
        self.steps += 1
        self.set_rate(self.steps)
        if unknown := gradients.keys() - self.tensors.keys():
            raise CommandError(f"{self.who}: there is a gradient of {unknown}, and no such parameter")
        for name, p in self.tensors.items():
            gradient = gradients.get(name)
            p.grad = None if gradient is None else self.torch.as_tensor(gradient.copy(), dtype=p.dtype)
        with blame(self.who, "step()"):
            self.optimizer.step()
        for name, p in self.tensors.items():  # which it may have replaced instead of written to
            np.copyto(params[name], p.detach().numpy())

    @property
    def state(self) -> Any:
        return self.optimizer.state
