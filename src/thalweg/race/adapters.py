"""Optimizers of other libraries on tasks of ours: made, given their learning rate, and told of when they fail."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from thalweg.errors import CommandError
from thalweg.numpy.arrays import checked_pair, pairs
from thalweg.race.contestants import Contestant
from thalweg.race.rivals import WANTED, Rival
from thalweg.race.task import Array, Schedule
from thalweg.show.modules import place_of, said


class Stepper(Protocol):
    """What a task in numpy needs of an optimizer; those of ``thalweg.numpy`` are such."""

    @property
    def state(self) -> Mapping[Any, Mapping[Any, Any]]: ...

    @property
    def engine(self) -> str: ...

    def step(self, params: Any, grads: Any, /) -> None: ...

    def stats(self) -> Mapping[Any, Mapping[str, Any]]: ...


@contextmanager
def blamed(rival: Contestant, task: str, what: str) -> Iterator[None]:
    """Whatever a rival raises is told in one sentence, with its name and its task."""
    try:
        yield
    except CommandError:
        raise
    except Exception as error:
        who = rival.name if rival.name == rival.rule else f"{rival.name} ({rival.rule})"
        raise CommandError(f"task {task!r}, {who}: {what} failed{place_of(error)}: {said(error)}") from error


def torch_optimizer(rival: Rival, params: Any, lr: float, task: str) -> Any:
    """An optimizer of torch for these parameters."""
    torch: Any = importlib.import_module("torch")
    options = written_call(rival, f"lr={lr:g}")
    with blamed(rival, task, options):
        made = rival.make(params, lr=lr, **rival.options)
    if not isinstance(made, torch.optim.Optimizer):
        raise CommandError(f"{rival.rule} returned a {type(made).__name__}, not an optimizer: {WANTED}")
    if any("lr" not in group for group in made.param_groups):
        raise CommandError(f"{rival.rule} has no lr in its groups, and the race must lower it step by step")
    return made


def written_call(rival: Rival, rate: str) -> str:
    inner = ", ".join([rate, *(f"{name}={value!r}" for name, value in rival.options.items())])
    return f"{rival.rule.rpartition('.')[2]}(..., {inner})" if rival.kind == "torch" else f"{rival.rule}({inner})"


def scheduled(optimizer: Any, schedule: Schedule) -> Callable[[int], None]:
    """What sets the rates of an optimizer of torch for a step; groups with rates of their own keep their proportion."""
    first = schedule(1)
    shares = [float(group["lr"]) / first for group in optimizer.param_groups]

    def at(step: int) -> None:
        for group, share in zip(optimizer.param_groups, shares, strict=True):
            rate = schedule(step) * share
            if hasattr(group["lr"], "fill_"):  # a tensor, which others may hold
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    return at


def leaves(state: Any) -> Iterator[Any]:
    """The arrays and tensors somewhere in a state."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for entry in state:
            yield from leaves(entry)
    elif hasattr(state, "nbytes"):
        yield state


class ByTorch:
    """Arrays stepped by an optimizer of torch, through tensors that share their memory."""

    engine = "torch"

    def __init__(self, rival: Rival, params: Mapping[str, Array], schedule: Schedule, task: str) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.rival, self.task, self.steps = rival, task, 0
        self.tensors = {name: self.torch.nn.Parameter(self.tensor(p)) for name, p in params.items()}
        self.optimizer = torch_optimizer(rival, list(self.tensors.values()), schedule(1), task)
        self.set_rate = scheduled(self.optimizer, schedule)

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
        with blamed(self.rival, self.task, "step()"):
            self.optimizer.step()
        for name, p in self.tensors.items():
            result = p.detach()
            if result.data_ptr() != params[name].ctypes.data:  # it was replaced instead of written to
                self.tensor(params[name]).copy_(result)

    @property
    def state(self) -> Mapping[Any, Mapping[Any, Any]]:
        return {"": dict(enumerate(leaves(self.optimizer.state)))}

    def stats(self) -> Mapping[Any, Mapping[str, Any]]:
        return {}


class ByOptax:
    """Arrays stepped by a transformation of optax, compiled, in the precision of the arrays."""

    engine = "optax"

    def __init__(self, rival: Rival, params: Mapping[str, Array], schedule: Schedule, task: str) -> None:
        self.jax: Any = importlib.import_module("jax")
        self.rival, self.task = rival, task
        self.double = any(p.dtype == np.float64 for p in params.values())
        with self.precision(), blamed(rival, task, written_call(rival, f"learning_rate={schedule(1):g}")):
            # optax counts from 0
            made = rival.make(learning_rate=lambda count: schedule(count + 1), **rival.options)
        if not callable(getattr(made, "init", None)) or not callable(getattr(made, "update", None)):
            raise CommandError(f"{rival.rule} returned a {type(made).__name__}, not an optimizer: {WANTED}")
        self.update = self.jax.jit(made.update)
        with self.precision(), blamed(rival, task, "init()"):
            self.kept = made.init(dict(params))
        # compiled now, off the clock; a second time for states that change their types in the first step
        nothing, kept = {name: np.zeros_like(p) for name, p in params.items()}, self.kept
        for _ in range(2):
            with self.precision(), blamed(rival, task, "update()"):
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
        with self.precision(), blamed(self.rival, self.task, "update()"):
            gradients = {name: known[name].astype(p.dtype, copy=False) for name, p in params.items()}
            updates, self.kept = self.update(gradients, self.kept, dict(params))
            for name, p in params.items():
                p += np.asarray(updates[name]).astype(p.dtype)

    @property
    def state(self) -> Mapping[Any, Mapping[Any, Any]]:
        return {"": dict(enumerate(self.jax.tree.leaves(self.kept)))}

    def stats(self) -> Mapping[Any, Mapping[str, Any]]:
        return {}


def stepper(rival: Rival, params: Mapping[str, Array], schedule: Schedule, task: str) -> Stepper:
    """Whatever can step the arrays of a task for a rival."""
    return (ByTorch if rival.kind == "torch" else ByOptax)(rival, params, schedule, task)
