"""What is raced on: tasks in plain numpy and in PyTorch, whose models the race trains step by step."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from thalweg.errors import CommandError, OptimError
from thalweg.show.devices import Device
from thalweg.show.extras import extra
from thalweg.show.modules import describe_failure

if TYPE_CHECKING:
    from thalweg.race.contestants import Contestant
    from thalweg.race.run import Run

Array: TypeAlias = npt.NDArray[Any]
Gradients: TypeAlias = Mapping[str, Array | None]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Something to learn. A task of your own is an ``ArrayTask`` or a ``ModelTask``."""

    name: str
    title: str = ""
    about: str = ""
    #: The loss, or the loss and a score, of the parameters or the model.
    evaluate: Callable[[Any], Any]
    #: Batches, endlessly, for a seed and a batch size; without them every batch is None.
    batches: Callable[[int, Any], Iterator[Any]] = lambda seed, batch_size: itertools.repeat(None)
    #: Steps of each run.
    steps: int = 200
    batch_size: int | None = None
    #: How often the best learning rates are tried, from seeds 0, 1, ...
    seeds: int = 3
    #: A loss that is worth reaching: the table says after how many steps and seconds.
    target: float | None = None
    loss_name: str = "training loss"
    score_name: str | None = None
    #: Which scores are better: the "most", or the "least".
    best_score: Literal["most", "least"] = "most"
    #: The share of the steps over which the learning rate rises, before it falls in a straight line.
    warm_up: float = 0.0
    #: Changes when the task does, so that runs of another version are not taken for runs of this one.
    fingerprint: str = ""

    @abstractmethod
    def begin(self, contestant: Contestant, run: Run) -> Any:
        """What is trained, as it is before the first step: arrays by name for a rule, or a model of torch."""

    @abstractmethod
    def compute_gradients(self, model: Any, batch: Any, run: Run, step: int) -> Gradients | None:
        """The gradients by name; None if the parameters of the model have them then."""

    def measure(self, model: Any, *, is_over: bool) -> tuple[float, float | None]:
        """The loss of the model, now or at the end of the run, and its score if it has one."""
        answer = self.call("evaluate", self.evaluate, model)
        loss, score = answer if isinstance(answer, (tuple, list)) and len(answer) == 2 else (answer, None)
        try:
            return float(loss), None if score is None else float(score)
        except (TypeError, ValueError):
            words = f"evaluate must return a loss, or a loss and a score, got {type(answer).__name__}"
            raise self.error(words) from None

    def check(self) -> None:
        """Raise a CommandError for what cannot be right."""
        if not self.name or not isinstance(self.name, str):
            raise CommandError(f"a task needs a name, such as 'mine', got {self.name!r}")
        counts = {"steps": self.steps, "seeds": self.seeds, "batch_size": self.batch_size or 1}
        functions = [f.name for f in fields(self) if str(f.type).startswith("Callable")]
        wanted = {name: "a whole number from 1 on" for name, n in counts.items() if not isinstance(n, int) or n < 1}
        wanted |= {name: "a function" for name in functions if not callable(getattr(self, name))}
        if not isinstance(self.warm_up, Real) or not 0 <= self.warm_up < 1:
            wanted["warm_up"] = "a share of the steps below 1"
        if self.best_score not in ("most", "least"):
            wanted["best_score"] = "'most' or 'least'"
        if self.target is not None and not isinstance(self.target, Real):
            wanted["target"] = "a number, a loss"
        for name, words in wanted.items():
            raise self.error(f"{name} must be {words}, got {getattr(self, name)!r}")

    def error(self, words: str) -> CommandError:
        return CommandError(f"task {self.name!r}: {words}")

    def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the task; report whatever it raises in one sentence, with its place."""
        with blame(f"task {self.name!r}", what):
            return function(*arguments)

    def rate_at(self, run: Run, step: int) -> float:
        """The learning rate of a step, counted from 1: up over a share of the steps, then down to almost 0.

        Small steps at the end take the noise of large ones out of the loss that a rate is judged by.
        """
        rising = max(int(self.warm_up * run.steps), 1)
        return run.lr * min(step / rising, (run.steps + 1 - step) / (run.steps + 1 - rising))

    def begin_batches(self, run: Run) -> Iterator[Any]:
        """The batches of a run; too few of them are a mistake, not an end."""
        batches = self.call("batches", self.batches, run.seed, run.batch_size)
        try:
            iterator = iter(batches)
        except TypeError:
            raise self.error(f"batches must return something to iterate over, got {type(batches).__name__}") from None
        end = object()
        while (batch := self.call("batches", next, iterator, end)) is not end:
            yield batch
        raise self.error("batches must not end: start again after the last one")


@dataclass(frozen=True, kw_only=True)
class ArrayTask(Task):
    """A task in numpy: parameters by name, and gradients from a function.

    >>> task = ArrayTask(
    ...     name="parabola",
    ...     init=lambda seed: {"x": np.random.default_rng(seed).normal(size=8)},
    ...     gradients=lambda params, batch: {"x": 2 * params["x"]},
    ...     evaluate=lambda params: np.square(params["x"]).sum(),
    ... )
    """

    #: The first parameters by name, for a seed.
    init: Callable[[int], Mapping[str, Array]]
    #: The gradients by name, for parameters and a batch.
    gradients: Callable[[Any, Any], Mapping[str, Array]]

    def begin(self, contestant: Contestant, run: Run) -> Any:
        if run.device != "cpu":
            raise self.error(f"it is plain numpy and runs only on the cpu, not on {run.device!r}")
        params = self.call("init", self.init, run.seed)
        if not isinstance(params, Mapping):
            raise self.error(f"init must return arrays by name, got {type(params).__name__}")
        for name, p in params.items():
            if not isinstance(p, np.ndarray):
                raise self.error(f"init must return arrays by name, and {name!r} is a {type(p).__name__}")
        arrays = {name: np.array(p) for name, p in params.items()}
        return arrays if contestant.rule else make_model(arrays)

    def compute_gradients(self, model: Any, batch: Any, run: Run, step: int) -> Gradients | None:
        gradients: Gradients = self.call("gradients", self.gradients, arrays_of(model), batch)
        if isinstance(model, Mapping):
            return gradients
        model.zero_grad()
        for name, gradient in gradients.items():
            with blame(f"task {self.name!r}", f"the gradient of {name!r}"):
                p = model.get_parameter(name)
                p.grad = None if gradient is None else p.new_tensor(gradient)
        return None

    def measure(self, model: Any, *, is_over: bool) -> tuple[float, float | None]:
        return super().measure(arrays_of(model), is_over=is_over)


def make_model(params: Mapping[str, Array]) -> Any:
    """A model of torch whose modules follow the dots in the names; a ``weight`` of two axes is of a linear layer."""
    torch: Any = importlib.import_module("torch")
    layer = type("Linear", (torch.nn.Module,), {})  # mixtures tell linear layers by the name of their class
    model = torch.nn.Module()
    for name, array in params.items():
        *path, last = name.split(".")
        module = model
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, layer())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.from_numpy(array)))
    return model


def arrays_of(model: Any) -> Mapping[str, Array]:
    """The parameters of a model by name; those of torch share its memory."""
    if isinstance(model, Mapping):
        return model
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


@dataclass(frozen=True, kw_only=True)
class ModelTask(Task):
    """A task in PyTorch: a module, and a loss to differentiate; batches of tensors are moved to the device.

    ``evaluate`` is called without gradients and in ``eval`` mode.
    """

    #: The model, for a seed, with which the race seeds torch first.
    model: Callable[[int], Any]
    #: The loss of a model on a batch, a tensor with one element.
    loss: Callable[[Any, Any], Any]
    #: The norm of all gradients together that a step may have at most; larger ones are scaled down to it.
    max_grad_norm: float | None = None

    def begin(self, contestant: Contestant, run: Run) -> Any:
        with extra("torch"):
            import torch
        device = Device(run.device)
        with device.seed_torch(run.seed, 0):
            model = self.call("model", self.model, run.seed)
        if not isinstance(model, torch.nn.Module):
            raise self.error(f"model must return a torch.nn.Module, got {type(model).__name__}")
        return model.to(device.name)

    def compute_gradients(self, model: Any, batch: Any, run: Run, step: int) -> None:
        torch: Any = importlib.import_module("torch")
        device = Device(run.device)
        model.zero_grad()
        with device.seed_torch(run.seed, step):  # for dropout and the like
            loss = self.call("loss", self.loss, model, device.move(batch))
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise self.error(f"loss must return a tensor with one element, got {got}")
            self.call("the backward pass of loss", loss.backward)
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)

    def measure(self, model: Any, *, is_over: bool) -> tuple[float, float | None]:
        with evaluating(model):
            return super().measure(model, is_over=is_over)


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A context in which a model of torch is in ``eval`` mode, and no gradients are recorded."""
    torch: Any = importlib.import_module("torch")
    training = model.training
    model.eval()
    with torch.no_grad():
        yield
    model.train(training)


@contextmanager
def blame(whom: str, what: str) -> Iterator[None]:
    """Report whatever is raised within in one sentence, with its place; our own errors say themselves what is wrong."""
    try:
        yield
    except CommandError:
        raise
    except OptimError as error:
        raise CommandError(f"{whom}: {error}") from None
    except Exception as error:
        raise CommandError(f"{whom}: {what} failed{describe_failure(error)}") from error


def shuffle_batches(count: int, seed: int, batch_size: int) -> Iterator[Array]:
    """Batches of indices, endlessly: everyone in a new order, over and over, cut into equal parts.

    A batch may be larger than the set; then it holds some examples more than once.
    """
    rng = np.random.default_rng(seed)
    waiting = np.empty(0, np.int64)
    while True:
        while len(waiting) < batch_size:
            waiting = np.concatenate([waiting, rng.permutation(count)])
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]
