"""Contestants as optimizers: of a model in torch, or of arrays, which optimizers of torch step through tensors."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant, write_options
from thalweg.race.task import Array, Run, Schedule, Task, blame


def make_for_model(contestant: Contestant, model: Any, task: Task, run: Run) -> Any:
    """An optimizer of torch for a model."""
    torch: Any = importlib.import_module("torch")
    who, lr, options = name_in(task, contestant), run.lr, contestant.all_options
    if contestant.rule is not None:
        with blame(who, "making it"):
            make = importlib.import_module("thalweg.torch").optimizer(contestant.rule)
            return make(model.named_parameters(), lr=lr, engine=run.engine, **options)
    assert contestant.make is not None
    call = f"{contestant.path or contestant.name}({contestant.takes}, lr={lr:g}, {write_options(options)})"
    with blame(who, call.replace(", )", ")")):
        is_of_model = contestant.takes == "model"
        takes_engine = is_of_model and "engine" in inspect.signature(contestant.make).parameters
        target = model if is_of_model else list(model.parameters())
        made = contestant.make(target, lr=lr, **({"engine": run.engine} if takes_engine else {}), **options)
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
        return make(lr=task.schedule(run), engine=run.engine, **contestant.all_options)


def name_in(task: Task, contestant: Contestant) -> str:
    """A contestant and its task, as error messages name them."""
    path = contestant.path or contestant.name
    who = contestant.name if contestant.name == path else f"{contestant.name} ({path})"
    return f"task {task.name!r}, {who}"


def follow_schedule(optimizer: Any, schedule: Schedule) -> Callable[[int], None]:
    """What sets the rates of an optimizer of torch for a step; groups with rates of their own keep their proportion."""
    shares = [float(group["lr"]) / schedule.lr for group in optimizer.param_groups]

    def set_rate(step: int) -> None:
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            rate = schedule(step) * share
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
        with blame(self.who, "a model of these arrays"):
            self.model = self.make_model(params)
        self.tensors = {name: self.model.get_parameter(name) for name in params}
        self.optimizer = make_for_model(contestant, self.model, task, run)
        self.set_rate, self.steps = follow_schedule(self.optimizer, task.schedule(run)), 0
        self.engine = str(getattr(self.optimizer, "engine", "torch"))
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
        if unknown := [name for name in gradients if name not in self.tensors]:
            raise CommandError(f"{self.who}: there is a gradient of {unknown[0]!r}, and no such parameter")
        for name, p in self.tensors.items():
            gradient = gradients.get(name)
            if gradient is not None and gradient.shape != params[name].shape:
                shapes = f"{gradient.shape}, and the parameter {params[name].shape}"
                raise CommandError(f"{self.who}: the gradient of {name!r} has shape {shapes}")
            p.grad = None if gradient is None else self.torch.as_tensor(gradient.copy(), dtype=p.dtype)
        with blame(self.who, "step()"):
            self.optimizer.step()
        for name, p in self.tensors.items():  # which it may have replaced instead of written to
            np.copyto(params[name], p.detach().numpy())

    @property
    def state(self) -> Any:
        return self.optimizer.state
