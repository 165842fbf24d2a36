"""One run, a contestant at a learning rate from a seed; and its record, a line of ``runs.jsonl``."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from thalweg.errors import OptionError
from thalweg.race.contestants import Contestant
from thalweg.race.task import Task, blame
from thalweg.show.arguments import check_file
from thalweg.show.devices import Device

#: A loss that is so many times the first one is as good as infinite.
DIVERGED = 1e6
#: How often a run is measured, beside its beginning, if it has so many steps.
POINTS = 22


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
    device: str
    thalweg: str


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run. From divergence on, losses and scores are None."""

    step: Sequence[int]
    #: Spent on batches, gradients and steps so far, not on measuring; no part of what a repetition must reproduce.
    seconds: Sequence[float] = field(compare=False)
    loss: Sequence[float | None]
    score: Sequence[float | None] | None
    parameters: int
    state_bytes: int


@dataclass(frozen=True)
class Record:
    run: Run
    result: Result
    #: Versions, machine and date.
    where: Mapping[str, Any] = field(compare=False)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped before its last step."""
        return self.result.step[-1] < self.run.steps


def or_infinite(loss: float | None) -> float:
    """A loss to compare: infinite for a run that diverged."""
    return math.inf if loss is None else loss


class Training:
    """A model and its optimizer: arrays by name that a rule steps in numpy, or a module of torch."""

    def __init__(self, task: Task, contestant: Contestant, run: Run) -> None:
        self.task, self.run, self.label = task, run, f"task {task.name!r}, {contestant.name}"
        self.model = task.begin(contestant, run)
        self.is_arrays = isinstance(self.model, Mapping)
        with blame(self.label, f"making it with lr={run.lr:g}"):
            if self.is_arrays:
                make = importlib.import_module("thalweg.numpy").optimizer(contestant.rule)
                self.optimizer = make(lr=partial(task.rate_at, run), **contestant.options)
            else:
                self.optimizer = contestant.make(self.model, lr=run.lr, **contestant.options)
                self.shares = share_rates(self.optimizer, run.lr)
        self.batches = task.begin_batches(run)

    def step(self, number: int) -> None:
        """Take a batch, compute its gradients and step, for the number of the step from 1 on."""
        # a rate that is too large is part of any sweep: its overflows are recorded, not warned of
        with np.errstate(all="ignore"):
            gradients = self.task.compute_gradients(self.model, next(self.batches), self.run, number)
            with blame(self.label, "step()"):
                if self.is_arrays:
                    self.optimizer.step(self.model, gradients)
                else:
                    self.set_rates(self.task.rate_at(self.run, number))
                    self.optimizer.step()

    def set_rates(self, rate: float) -> None:
        for group, share in zip(self.optimizer.param_groups, self.shares, strict=True):
            if hasattr(group["lr"], "fill_"):  # a tensor, which others may hold
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share

    def measure(self, number: int) -> tuple[float, float | None]:
        """How well the model does after so many steps: its averages, if the optimizer keeps some."""
        with np.errstate(all="ignore"), ExitStack() as stack:
            if hasattr(self.optimizer, "averaged"):
                with suppress(OptionError):  # it keeps none
                    stack.enter_context(self.optimizer.averaged(*[self.model] * self.is_arrays))
            return self.task.measure(self.model, is_over=number == self.run.steps)


def share_rates(optimizer: Any, lr: float) -> list[float]:
    """The rate of each group of an optimizer of torch, as a multiple of lr: groups keep their proportion."""
    torch: Any = importlib.import_module("torch")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"it returned a {type(optimizer).__name__}, and must return an optimizer of torch")
    if any("lr" not in group for group in optimizer.param_groups):
        raise TypeError("it has no lr in its groups, and the race must lower it step by step")
    return [float(group["lr"]) / lr for group in optimizer.param_groups]


def execute(
    task: Task,
    contestant: Contestant,
    run: Run,
    is_hopeless: Callable[[Run, int, float | None], bool] = lambda run, step, loss: False,
) -> Result:
    """Train once. A run that diverges has a record of full length; one that is hopeless ends there.

    is_hopeless: says of a run, a step and the loss there whether it is.
    """
    training, wait = Training(task, contestant, run), Device(run.device).wait
    times, seconds = measuring_times(run.steps), [0.0]
    first_loss, first_score = training.measure(0)
    if not math.isfinite(first_loss):
        raise task.error(f"the loss before the first step is {first_loss}: it must be finite")
    losses, scores = [none_if_infinite(first_loss)], [none_if_infinite(first_score)]
    for before, until in itertools.pairwise(times):
        spent, loss, score = 0.0, None, None
        if losses[-1] is not None:
            start = time.perf_counter()
            for step in range(before, until):
                training.step(step + 1)
            wait()
            spent = time.perf_counter() - start
            loss, score = map(none_if_infinite, training.measure(until))
            if loss is None or abs(loss) > DIVERGED * max(1.0, abs(first_loss)):
                loss, score = None, None
        seconds.append(seconds[-1] + spent)
        losses.append(loss)
        scores.append(score)
        if is_hopeless(run, until, loss):
            break
    params = training.model.values() if training.is_arrays else training.model.parameters()
    return Result(
        step=times[: len(losses)],
        seconds=seconds,
        loss=losses,
        score=None if first_score is None else scores,
        parameters=sum(math.prod(p.shape) for p in params),
        state_bytes=sum(array.nbytes for array in find_arrays(training.optimizer.state)),
    )


def measuring_times(steps: int) -> list[int]:
    """The beginning, the end, and what divides the steps between them as evenly as whole numbers can."""
    points = min(steps, POINTS)
    return [round(i * steps / points) for i in range(points + 1)]


def none_if_infinite(x: float | None) -> float | None:
    """A number that can be written down; None for what is infinite or no number."""
    return x if x is not None and math.isfinite(x) else None


def find_arrays(state: Any) -> Iterator[Any]:
    """The arrays and tensors somewhere in a state."""
    if isinstance(state, Mapping):
        state = list(state.values())
    if isinstance(state, (list, tuple)):
        for entry in state:
            yield from find_arrays(entry)
    elif hasattr(state, "nbytes"):
        yield state


# ---- records


def read_records(path: Path) -> tuple[dict[Run, Record], int]:
    """The records of a file by their runs, and how many of its lines are none: those are skipped."""
    records: dict[Run, Record] = {}
    skipped = 0
    if path.exists():
        check_file(path)
        for line in path.read_bytes().splitlines():
            try:
                record = read_record(line)
                records[record.run] = record
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                skipped += bool(line.strip())
    return records, skipped


def read_record(line: bytes) -> Record:
    """The record in a line; what else stands there is left out, and what is missing or no number raises."""
    content = json.loads(line)
    run = Run(**{f.name: content["run"][f.name] for f in fields(Run)})
    result = Result(**{f.name: content["result"][f.name] for f in fields(Result)})
    for moment in zip(result.step, result.seconds, result.loss, result.score or result.loss, strict=True):
        math.fsum(number for number in moment if number is not None)
    return Record(run, result, dict(content["where"]))


def append_record(path: Path, record: Record) -> None:
    """Add a line; one that was cut off before it is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + json.dumps(asdict(record)) + "\n")
