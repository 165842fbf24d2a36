"""Optimizers for models and arrays: ours, and those of other libraries, which step arrays through an adapter."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np

from thalweg.errors import CommandError, OptionError
from thalweg.numpy.arrays import checked_pair, pairs
from thalweg.race.contestants import Contestant
from thalweg.race.rivals import WANTED
from thalweg.race.task import Array, Schedule, blame
from thalweg.show import registered


def name_in(task: str, contestant: Contestant) -> str:
    """A contestant and its task, as error messages name them."""
    who = contestant.name if contestant.name == contestant.rule else f"{contestant.name} ({contestant.rule})"
    return f"task {task!r}, {who}"


@contextmanager
def put_averages(optimizer: Any, *params: Any) -> Iterator[None]:
    """Within: parameters are their averages, if the optimizer keeps some."""
    with ExitStack() as stack:
        if hasattr(optimizer, "averaged"):
            with suppress(OptionError):  # it keeps none
                stack.enter_context(optimizer.averaged(*params))
        yield


def make_for_model(contestant: Contestant, model: Any, lr: float, engine: str, task: str) -> Any:
    """An optimizer of torch for a model."""
    if contestant.kind == "optax":
        raise CommandError(
            f"task {task!r} is in torch, and {contestant.name} is of optax, which races only on tasks in numpy: "
            "digits, valley, or an ArrayTask of your own"
        )
    if contestant.kind == "torch":
        return make_for_tensors(contestant, list(model.parameters()), lr, task)
    if contestant.make is not None:
        engines = {"engine": engine} if "engine" in inspect.signature(contestant.make).parameters else {}
        call = f"{contestant.name}(model, lr={lr:g})"
        return make_foreign(contestant, model, lr, task, call, ": it must return an optimizer of torch", **engines)
    with blame(name_in(task, contestant), "making it"):
        if contestant.kind == "mixture":
            make = registered.torch_mixture(contestant.rule)
            return make(model, lr, engine=engine, **{"adamw_lr": lr, **contestant.options})
        kind = registered.optimizer_of("torch", contestant.rule)
        return kind(model.named_parameters(), lr=lr, engine=engine, **contestant.options)


def make_foreign(contestant: Contestant, params: Any, lr: float, task: str, call: str, wanted: str, **more: Any) -> Any:
    """An optimizer of torch that is not ours, for tensors or for a model. call: as it is written in an error."""
    torch: Any = importlib.import_module("torch")
    with blame(name_in(task, contestant), call):
        made = contestant.make(params, lr=lr, **more, **contestant.options)  # type: ignore[misc]
    if not isinstance(made, torch.optim.Optimizer):
        raise CommandError(f"{contestant.rule} returned a {type(made).__name__}{wanted}")
    return made


def make_for_tensors(rival: Contestant, params: Any, lr: float, task: str) -> Any:
    """An optimizer of another library for tensors of torch."""
    call = write_call(rival, f"lr={lr:g}")
    made = make_foreign(rival, params, lr, task, call, f", not an optimizer: {WANTED}")
    if any("lr" not in group for group in made.param_groups):
        raise CommandError(f"{rival.rule} has no lr in its groups, and the race must lower it step by step")
    return made


def make_for_arrays(
    contestant: Contestant, params: Mapping[str, Array], schedule: Schedule, engine: str, task: str
) -> Any:
    """An optimizer for arrays of numpy."""
    if contestant.is_rival:
        return (ByTorch if contestant.kind == "torch" else ByOptax)(contestant, params, schedule, task)
    if contestant.kind == "mixture":
        raise CommandError(
            f"task {task!r} is plain numpy, and {contestant.name} needs a model of torch, whose modules tell "
            "parameters apart: race it on text, on fashion, or on a ModelTask of your own"
        )
    with blame(name_in(task, contestant), "making it"):
        return registered.optimizer_of("numpy", contestant.rule)(lr=schedule, engine=engine, **contestant.options)


def write_call(rival: Contestant, rate: str) -> str:
    inner = ", ".join([rate, *(f"{name}={value!r}" for name, value in rival.options.items())])
    return f"{rival.rule.rpartition('.')[2]}(..., {inner})" if rival.kind == "torch" else f"{rival.rule}({inner})"


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


class ByTorch:
    """Arrays stepped by an optimizer of torch, through tensors that share their memory."""

    engine = "torch"

    def __init__(self, rival: Contestant, params: Mapping[str, Array], schedule: Schedule, task: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.rival, self.task, self.steps = rival, task, 0
        self.tensors = {name: self.torch.nn.Parameter(self.tensor(p)) for name, p in params.items()}
        self.optimizer = make_for_tensors(rival, list(self.tensors.values()), schedule.lr, task)
        self.set_rate = follow_schedule(self.optimizer, schedule)

    def tensor(self, array: Array) -> Any:
        if array.dtype.name == "bfloat16":  # not numpy's own
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Array | None]) -> None:
        self.steps += 1
        self.set_rate(self.steps)
        for p in self.tensors.values():
            p.grad = None
        for name, weights, gradient in pairs(params, grads):
            _, gradient = checked_pair(name, weights, gradient, None)
            self.tensors[str(name)].grad = self.tensor(np.array(gradient, weights.dtype, order="C"))
        with blame(name_in(self.task, self.rival), "step()"):
            self.optimizer.step()
        for name, p in self.tensors.items():
            result = p.detach()
            if result.data_ptr() != params[name].ctypes.data:  # it was replaced instead of written to
                self.tensor(params[name]).copy_(result)

    @property
    def state(self) -> Any:
        return self.optimizer.state


class ByOptax:
    """Arrays stepped by a transformation of optax, compiled, in the precision of the arrays."""

    engine = "optax"

    def __init__(self, rival: Contestant, params: Mapping[str, Array], schedule: Schedule, task: str) -> None:
        self.jax: Any = importlib.import_module("jax")
        self.rival, self.task = rival, task
        self.double = any(p.dtype == np.float64 for p in params.values())
        with self.precision(), blame(name_in(task, rival), write_call(rival, f"learning_rate={schedule.lr:g}")):
            # optax counts from 0
            made = rival.make(  # type: ignore[misc]
                learning_rate=lambda count: schedule(count + 1), **rival.options
            )
        if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
            raise CommandError(f"{rival.rule} returned a {type(made).__name__}, not an optimizer: {WANTED}")
        self.update = self.jax.jit(made.update)
        with self.precision(), blame(name_in(task, rival), "init()"):
            self.kept = made.init(dict(params))
        # compiled now, off the clock; a second time for states that change their types in the first step
        nothing, kept = {name: np.zeros_like(p) for name, p in params.items()}, self.kept
        for _ in range(2):
            with self.precision(), blame(name_in(task, rival), "update()"):
                _, kept = self.update(nothing, kept, dict(params))

    @contextmanager
    def precision(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.double:
                wide = getattr(self.jax, "enable_x64", None)
                if wide is None:
                    wide = importlib.import_module("jax.experimental").enable_x64
                stack.enter_context(wide(True))
            stack.enter_context(self.jax.default_device(self.jax.devices("cpu")[0]))
            yield

    def step(self, params: Mapping[str, Array], grads: Mapping[str, Array | None]) -> None:
        known = {str(name): checked_pair(name, p, g, None)[1] for name, p, g in pairs(params, grads)}
        if missing := [name for name in params if name not in known]:
            raise CommandError(
                f"task {self.task!r}, {self.rival.name}: optax needs a gradient for every "
                f"parameter, and {missing} has none"
            )
        with self.precision(), blame(name_in(self.task, self.rival), "update()"):
            gradients = {name: known[name].astype(p.dtype, copy=False) for name, p in params.items()}
            updates, self.kept = self.update(gradients, self.kept, dict(params))
            for name, p in params.items():
                p += np.asarray(updates[name]).astype(p.dtype)

    @property
    def state(self) -> Any:
        return self.jax.tree.leaves(self.kept)
