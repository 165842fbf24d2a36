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


@dataclass(frozen=True)
class Training:
    """One model that is trained by one optimizer."""

    optimizer: Any
    #: Takes a batch, computes its gradients and steps, for the number of the step from 1 on.
    step: Callable[[int], None]
    #: How well the model does after so many steps.
    measure: Callable[[int], Measure]
    parameters: int
    #: Returns when all that was queued on a device is done.
    wait: Callable[[], None] = lambda: None


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
        numbers = {"steps": self.steps, "seeds": self.seeds, "batch_size": self.batch_size or 1}
        wanted = {name: "a whole number from 1 on" for name, n in numbers.items() if not isinstance(n, int) or n < 1}
        wanted |= {name: "a function" for name in self.functions if not callable(getattr(self, name))}
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

        So no rate is judged amid the noise of large steps.
        """
        rising = max(int(self.warm_up * run.steps), 1) if self.warm_up else 0
        if step <= rising:
            return run.lr * step / rising
        return run.lr * (run.steps + 1 - step) / (run.steps + 1 - max(rising, 1))

    def begin_batches(self, batches: Callable[[int, Any], Any], run: Run) -> Iterator[Any]:
        """The batches of a run; too few of them are a mistake, not an end."""
        made = self.call("batches", batches, run.seed, run.batch_size)
        try:
            remaining = iter(made)
        except TypeError:
            raise self.error(f"batches must return something to iterate over, got {type(made).__name__}") from None
        end = object()
        while (batch := self.call("batches", next, remaining, end)) is not end:
            yield batch
        raise self.error("batches must not end: start again after the last one")

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
