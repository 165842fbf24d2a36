"""One run: a task, a contestant, a learning rate, a seed; and what is recorded of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant
from thalweg.race.task import Measure, Run, Task

#: A loss that is so many times the first one is as good as infinite.
DIVERGED = 1e6
#: How often a run is measured, beside its beginning, if it has so many steps.
POINTS = 22


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Each parameter at some steps: the size of the step relative to the parameter, and its trust ratio."""

    names: tuple[str, ...]
    step: tuple[int, ...]
    #: By parameter, then by step; None where it is not finite.
    update: tuple[tuple[float | None, ...], ...]
    trust: tuple[tuple[float | None, ...], ...] | None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a run. From divergence on, losses and scores are None."""

    step: tuple[int, ...]
    #: Spent on batches, gradients and steps so far, not on measuring; no part of what a repetition must reproduce.
    seconds: tuple[float, ...] = field(compare=False)
    loss: tuple[float | None, ...]
    score: tuple[float | None, ...] | None
    layers: Layers | None
    #: Where a point in the plane has been, step by step.
    path: tuple[tuple[float, float], ...] | None
    parameters: int
    state_bytes: int
    #: The most memory that training took on a GPU: parameters, gradients, state and all between; None on others.
    peak_bytes: int | None = field(default=None, compare=False)
    engine: str


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


#: Called with a run, its step and its loss there.
Watch = Callable[[Run, int, float | None], Any]


def execute(
    task: Task,
    contestant: Contestant,
    run: Run,
    on_measure: Watch = lambda run, step, loss: None,
    hopeless: Watch = lambda run, step, loss: False,
) -> Result:
    """Train once. A run that diverges has a record of full length; one that is hopeless ends there."""
    training = task.start(contestant, run)
    times = measuring_times(run.steps)
    measures, seconds, done, peak = [training.measure()], [0.0], 0, None
    if not math.isfinite(measures[0].loss):
        raise CommandError(
            f"task {task.name!r}: the loss before the first step is {measures[0].loss}: it must be finite"
        )
    watched: list[dict[str, tuple[float, float | None]]] = []
    path = [] if task.landscape is None else [place(training.parameters())]

    def take_steps(until: int) -> float:
        """Seconds that the steps took."""
        nonlocal done
        training.device.forget_peak()
        start = time.perf_counter()
        while done < until:
            training.step()
            done += 1
            if task.landscape is not None:
                path.append(place(training.parameters()))
        training.device.wait()
        return time.perf_counter() - start

    for until in times[1:]:
        spent = seconds[-1]
        if is_going(measures):
            several = done < until - 1
            spent += take_steps(until - 1)
            used = training.peak_bytes()
            before = training.parameters()  # which takes memory of its own
            spent += take_steps(until)
            used = used if several else training.peak_bytes()
            peak = used if peak is None or used is None else max(peak, used)
            # without a trust ratio a rule still tells one, of 1
            figures = {} if contestant.options.get("trust") is False else training.figures()
            watched.append(watch(training.changes(before), figures))
            measures.append(training.measure())
        else:
            measures.append(measures[-1])
        seconds.append(spent)
        loss = finite(measures[-1].loss) if is_going(measures) else None
        on_measure(run, until, loss)
        if hopeless(run, until, loss):
            break
    alive = [is_going(measures[: i + 1]) for i in range(len(measures))]
    scores = [finite(m.score) if fine else None for m, fine in zip(measures, alive, strict=True)]
    return Result(
        step=tuple(times[: len(measures)]),
        seconds=tuple(seconds),
        loss=tuple(finite(m.loss) if fine else None for m, fine in zip(measures, alive, strict=True)),
        score=None if measures[0].score is None else tuple(scores),
        layers=layers_of(watched, times[1:]),
        path=None if task.landscape is None else tuple(path),
        parameters=sum(math.prod(p.shape) for p in training.parameters().values()),
        state_bytes=training.state_bytes(),
        peak_bytes=peak,
        engine=training.engine(),
    )


def is_going(measures: Sequence[Measure]) -> bool:
    """Whether a run is still worth going on with."""
    return abs(measures[-1].loss) <= DIVERGED * max(1.0, abs(measures[0].loss))


def measuring_times(steps: int) -> list[int]:
    """The beginning, the end, and what divides the steps between them as evenly as whole numbers can."""
    points = min(steps, POINTS)
    return [round(i * steps / points) for i in range(points + 1)]


def place(params: Mapping[str, Any]) -> tuple[float, float]:
    """Where a task in the plane stands: its two numbers."""
    x, y = (float(value) for p in params.values() for value in p.reshape(-1))
    return x, y


def watch(
    changes: Mapping[str, float], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[float, float | None]]:
    """For each parameter the size of its step, relative to its own, and its trust ratio if there is one."""
    found = {}
    for name, change in changes.items():
        ratio = figures.get(name, {}).get("trust_ratio")
        found[name] = (change, None if ratio is None else float(np.mean(np.asarray(ratio, np.float64))))
    return found


def layers_of(watched: Sequence[Mapping[str, tuple[float, float | None]]], times: Sequence[int]) -> Layers | None:
    if not watched:
        return None
    names = tuple(watched[0])
    has_trust = any(trust is not None for _, trust in watched[0].values())
    return Layers(
        names=names,
        step=tuple(times[: len(watched)]),
        update=tuple(tuple(finite(moment[name][0]) for moment in watched) for name in names),
        trust=tuple(tuple(finite(moment[name][1]) for moment in watched) for name in names) if has_trust else None,
    )


def finite(x: float | None) -> float | None:
    """A number that can be written down; None for what is infinite or no number."""
    return x if x is not None and math.isfinite(x) else None


def or_infinite(loss: float | None) -> float:
    """A loss to compare: what diverged comes last."""
    return math.inf if loss is None else loss


def loss_at(result: Result, step: int) -> float | None:
    """The loss at a step, if the run was measured there."""
    return dict(zip(result.step, result.loss, strict=True)).get(step)
