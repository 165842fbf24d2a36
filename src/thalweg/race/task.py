"""What is raced on: a task, and a training of it that the race drives step by step."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy.typing as npt

from thalweg.errors import CommandError, OptimError
from thalweg.race.contestants import CONTESTANTS, RATES, Contestant
from thalweg.show.arguments import suggest
from thalweg.show.devices import Device
from thalweg.show.modules import describe_failure

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Schedule:
    """A learning rate by step, counted from 1: up to ``lr`` over a share of the steps, then down in a straight line.

    The last is ``lr / steps``, so that no one is judged amid its noise.
    """

    lr: float
    steps: int
    warm_up: float = 0.0

    def __call__(self, t: Any) -> Any:
        rising = max(int(self.warm_up * self.steps), 1) if self.warm_up else 0
        if not rising:
            return self.lr * (self.steps + 1 - t) / self.steps
        is_rising = t <= rising  # JAX traces it: no branch
        return self.lr * (is_rising * t / rising + (1 - is_rising) * (self.steps + 1 - t) / (self.steps + 1 - rising))


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


class Measure(NamedTuple):
    """How well a model does: its loss, less is better, and its score where there is one, more is better."""

    loss: float
    score: float | None = None


class Training(ABC):
    """One model trained by one optimizer, on a device of which so many bytes were in use before."""

    optimizer: Any
    device: Device = Device()
    occupied: int = 0

    @abstractmethod
    def step(self) -> None:
        """A batch, its gradients, a step."""

    @abstractmethod
    def measure(self) -> Measure: ...

    @abstractmethod
    def parameters(self) -> Mapping[str, Any]:
        """The parameters as they are now; copies, so that they can be compared with later ones."""

    @abstractmethod
    def changes(self, before: Mapping[str, Any]) -> Mapping[str, float]:
        """The RMS of what was added to each parameter since, divided by the RMS it had."""

    def figures(self) -> Mapping[str, Mapping[str, Any]]:
        """Statistics of the optimizer's last step, by parameter; other libraries have none."""
        stats = getattr(self.optimizer, "stats", dict)
        return {str(name): figures for name, figures in stats().items()}

    def state_bytes(self) -> int:
        return sum(entry.nbytes for entry in leaves(self.optimizer.state))

    def engine(self) -> str:
        return str(getattr(self.optimizer, "engine", "torch"))

    def peak_bytes(self) -> int | None:
        """The most memory in use since the device forgot its peak, without what was there before the training."""
        peak = self.device.peak_bytes()
        return None if peak is None else peak - self.occupied


@dataclass(frozen=True, kw_only=True)
class Run:
    """What makes a run this run and no other. Two runs that are equal have equal curves, seconds apart."""

    task: str
    fingerprint: str
    contestant: str
    #: The rule and its options, as Python would write them.
    optimizer: str
    lr: float
    seed: int
    batch_size: int | None
    steps: int
    engine: str
    device: str
    thalweg: str


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """A function of two numbers, to be drawn as a map."""

    value: Callable[[Any, Any], Any]
    x: tuple[float, float]
    y: tuple[float, float]
    minima: Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Something to learn. A task of your own is an ``ArrayTask`` or a ``ModelTask``."""

    name: str
    title: str = ""
    about: str = ""
    #: Steps of each run at ``batch_size``; larger batches get fewer, so that all see as many examples.
    steps: int = 200
    batch_size: int | None = None
    #: How often each learning rate is tried, from seeds 0, 1, ...
    seeds: int = 3
    #: A loss that is worth reaching: the table says after how many steps and seconds.
    target: float | None = None
    loss_name: str = "training loss"
    score_name: str | None = None
    #: Which scores are better: the "most", or the "least".
    best_score: Literal["most", "least"] = "most"
    #: The share of the steps over which the learning rate rises, before it falls in a straight line.
    warm_up: float = 0.0
    #: Learning rates to try, by contestant: as many for everyone, and the best of them inside, not at an end.
    rates: Mapping[str, Sequence[float]] = field(default_factory=lambda: RATES)
    #: Further options, by contestant.
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    landscape: Landscape | None = None
    #: Whether a learning rate that does badly may be stopped before its last step.
    halving: bool = True
    #: How many more rates every contestant may try while the best of any is at an edge.
    widen: int = 3
    #: Changes when the task does, so that runs of another version are not taken for runs of this one.
    fingerprint: str = ""
    #: Fields that must be functions.
    functions: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def start(self, contestant: Contestant, run: Run) -> Training:
        """A new training: the same for the same seed, whichever optimizers take part."""

    def check(self) -> None:
        """Raise a CommandError for what cannot be right."""
        if not self.name or not isinstance(self.name, str):
            raise CommandError(f"a task needs a name, such as 'mine', got {self.name!r}")
        for name, needed in (("steps", self.steps), ("seeds", self.seeds), ("batch_size", self.batch_size or 1)):
            if not isinstance(needed, int) or needed < 1:
                raise self.error(f"{name} must be a whole number from 1 on, got {needed!r}")
        for name in self.functions:
            may_miss = self.__dataclass_fields__[name].default is None
            if not callable(getattr(self, name)) and not (may_miss and getattr(self, name) is None):
                wanted = "a function or None" if may_miss else "a function"
                raise self.error(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if not isinstance(self.warm_up, Real) or not 0 <= self.warm_up < 1:
            raise self.error(f"warm_up must be a share of the steps below 1, got {self.warm_up!r}")
        if self.best_score not in ("most", "least"):
            raise self.error(f"best_score must be 'most' or 'least', got {self.best_score!r}")
        if self.target is not None and not isinstance(self.target, Real):
            raise self.error(f"target must be a number, a loss, got {self.target!r}")
        for field_name, by_contestant in (("rates", self.rates), ("options", self.options)):
            if not isinstance(by_contestant, Mapping):
                raise self.error(f"{field_name} must be a dict by optimizer, got {type(by_contestant).__name__}")
        check_names([*self.rates, *self.options], f"task {self.name!r}: ")
        check_rates(self.rates, f"task {self.name!r}: ")
        for contestant, options in self.options.items():
            if not isinstance(options, Mapping):
                raise self.error(f"options of {contestant} must be a dict, got {options!r}")

    def error(self, words: str) -> CommandError:
        return CommandError(f"task {self.name!r}: {words}")

    def call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the task; report whatever it raises in one sentence, with its place."""
        with blame(f"task {self.name!r}", what):
            return function(*arguments)

    def schedule(self, run: Run) -> Schedule:
        return Schedule(run.lr, run.steps, self.warm_up)

    def begin_batches(self, batches: Callable[[int, Any], Any], run: Run) -> Iterator[Any]:
        """The batches of a run, from the first on."""
        found = self.call("batches", batches, run.seed, run.batch_size)
        try:
            return iter(found)
        except TypeError:
            raise self.error(f"batches must return something to iterate over, got {type(found).__name__}") from None

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """The next batch; too few of them are a mistake, not an end."""
        missing = object()
        batch = self.call("batches", next, batches, missing)
        if batch is missing:
            raise self.error("batches must not end: start again after the last one")
        return batch


def check_names(names: Iterable[str], where: str = "") -> None:
    """Raise a CommandError for an optimizer that does not race."""
    for name in names:
        if name not in CONTESTANTS:
            raise CommandError(f"{where}there is no optimizer {name!r}: {suggest(str(name), CONTESTANTS)}")


def check_rates(rates: Mapping[str, Any], where: str = "") -> None:
    """Raise a CommandError for learning rates that are none."""
    for contestant, given in rates.items():
        try:
            numbers = [float(lr) for lr in given]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(0 < lr < math.inf for lr in numbers):
            raise CommandError(
                f"{where}rates of {contestant or 'all optimizers'} must be positive numbers, got {given!r}"
            )


def leaves(state: Any) -> Iterator[Any]:
    """The arrays and tensors somewhere in a state."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for entry in state:
            yield from leaves(entry)
    elif hasattr(state, "nbytes"):
        yield state


def relative(change: float, size: float) -> float:
    return change / size if size > 0 else math.nan


def read_measure(task: Task, answer: Any) -> Measure:
    """What ``evaluate`` answered, checked: a loss, or a loss and a score."""
    if isinstance(answer, (tuple, list)) and len(answer) == 2:
        loss, score = answer
    else:
        loss, score = answer, None
    try:
        return Measure(float(loss), None if score is None else float(score))
    except (TypeError, ValueError):
        raise task.error(f"evaluate must return a loss, or a loss and a score, got {type(answer).__name__}") from None
