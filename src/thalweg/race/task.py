"""What is raced on: a task, and a training of it that the race drives step by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import numpy.typing as npt

from thalweg.errors import CommandError, OptimError, OptionError
from thalweg.race.contestants import Contestant
from thalweg.show.modules import describe_failure

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class Schedule:
    """A learning rate by step, counted from 1: up to ``lr`` over a share of the steps, then down in a straight line.

    It ends near 0, so that nobody is judged amid the noise of large steps.
    """

    lr: float
    steps: int
    warm_up: float = 0.0

    def __call__(self, t: int) -> float:
        rising = max(int(self.warm_up * self.steps), 1) if self.warm_up else 0
        if t <= rising:
            return self.lr * t / rising
        return self.lr * (self.steps + 1 - t) / (self.steps + 1 - max(rising, 1))


@dataclass(frozen=True, kw_only=True)
class Run:
    """What makes a run this run and no other. Two runs that are equal have equal curves, seconds apart."""

    task: str
    fingerprint: str
    contestant: str
    #: The optimizer with its options, as Python would write them.
    optimizer: str
    lr: float
    seed: int
    batch_size: int | None
    steps: int
    engine: str
    device: str
    thalweg: str


class Measure(NamedTuple):
    """How well a model does: its loss, less is better, and its score where there is one."""

    loss: float
    score: float | None = None


class Training(ABC):
    """One model that is trained by one optimizer."""

    optimizer: Any
    #: Returns when all that was queued on a device is done.
    wait: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def step(self) -> None:
        """Take a batch, compute its gradients, step."""

    @abstractmethod
    def measure(self) -> Measure: ...

    @abstractmethod
    def count_parameters(self) -> int: ...

    def count_state_bytes(self) -> int:
        return sum(entry.nbytes for entry in find_arrays(self.optimizer.state))

    def engine(self) -> str:
        return str(getattr(self.optimizer, "engine", "torch"))


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """Something to learn. A task of your own is an ``ArrayTask`` or a ``ModelTask``."""

    name: str
    title: str = ""
    about: str = ""
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
        for name, number in (("steps", self.steps), ("seeds", self.seeds), ("batch_size", self.batch_size or 1)):
            if not isinstance(number, int) or number < 1:
                raise self.error(f"{name} must be a whole number from 1 on, got {number!r}")
        for name in self.functions:
            may_miss = self.__dataclass_fields__[name].default is None
            if not callable(getattr(self, name)) and not (may_miss and getattr(self, name) is None):
                wanted = "a function or None" if may_miss else "a function"
                raise self.error(f"{name} must be {wanted}, got {getattr(self, name)!r}")
        if not isinstance(self.widen, int) or self.widen < 0:
            raise self.error(f"widen must be a whole number from 0 on, got {self.widen!r}")
        if not isinstance(self.warm_up, Real) or not 0 <= self.warm_up < 1:
            raise self.error(f"warm_up must be a share of the steps below 1, got {self.warm_up!r}")
        if self.best_score not in ("most", "least"):
            raise self.error(f"best_score must be 'most' or 'least', got {self.best_score!r}")
        if self.target is not None and not isinstance(self.target, Real):
            raise self.error(f"target must be a number, a loss, got {self.target!r}")

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
        made = self.call("batches", batches, run.seed, run.batch_size)
        try:
            return iter(made)
        except TypeError:
            raise self.error(f"batches must return something to iterate over, got {type(made).__name__}") from None

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """The next batch; too few of them are a mistake, not an end."""
        missing = object()
        batch = self.call("batches", next, batches, missing)
        if batch is missing:
            raise self.error("batches must not end: start again after the last one")
        return batch

    def read_measure(self, answer: Any) -> Measure:
        """What ``evaluate`` answered, checked: a loss, or a loss and a score."""
        loss, score = answer if isinstance(answer, (tuple, list)) and len(answer) == 2 else (answer, None)
        try:
            return Measure(float(loss), None if score is None else float(score))
        except (TypeError, ValueError):
            words = f"evaluate must return a loss, or a loss and a score, got {type(answer).__name__}"
            raise self.error(words) from None


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


@contextmanager
def put_averages(optimizer: Any, *params: Any) -> Iterator[None]:
    """Within: parameters are their averages, if the optimizer keeps some."""
    with ExitStack() as stack:
        if hasattr(optimizer, "averaged"):
            with suppress(OptionError):  # it keeps none
                stack.enter_context(optimizer.averaged(*params))
        yield


def find_arrays(state: Any) -> Iterator[Any]:
    """The arrays and tensors somewhere in a state."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for entry in state:
            yield from find_arrays(entry)
    elif hasattr(state, "nbytes"):
        yield state
