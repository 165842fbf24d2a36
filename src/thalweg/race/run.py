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
from thalweg.race.task import Array, Conditions, Measure, Schedule, Task, Training

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
    engine: str


@dataclass(frozen=True)
class Record:
    run: Run
    result: Result
    #: Versions, machine and date.
    where: Mapping[str, Any] = field(compare=False)


@dataclass(frozen=True)
class Progress:
    """Where a run stands."""

    run: Run
    step: int
    loss: float | None


def execute(
    task: Task, contestant: Contestant, run: Run, on_measure: Callable[[Progress], None] = lambda progress: None
) -> Result:
    """Train once. A run that diverges stops there, yet its record has its full length."""
    training = begun(task, contestant, run)
    times = measuring_times(run.steps)
    measures, seconds, spent = [training.measure()], [0.0], 0.0
    if not math.isfinite(measures[0].loss):
        raise CommandError(
            f"task {task.name!r}: the loss before the first step is {measures[0].loss}: it must be finite"
        )
    watched: list[dict[str, tuple[float, float | None]]] = []
    path = [] if task.landscape is None else [place(training.parameters())]
    done = 0
    for until in times[1:]:
        if going(measures):
            start = time.perf_counter()
            while done < until - 1:
                training.step()
                done += 1
                if task.landscape is not None:
                    path.append(place(training.parameters()))
            training.wait()
            spent += time.perf_counter() - start
            before = training.parameters()
            start = time.perf_counter()
            training.step()
            training.wait()
            spent += time.perf_counter() - start
            done = until
            after = training.parameters()
            if task.landscape is not None:
                path.append(place(after))
            # without a trust ratio a rule still tells one, of 1
            figures = {} if contestant.options.get("trust") is False else training.figures()
            watched.append(watch(before, after, figures))
            measures.append(training.measure())
        else:
            measures.append(measures[-1])
        seconds.append(spent)
        on_measure(Progress(run, until, known(measures[-1].loss) if going(measures) else None))
    alive = [going(measures[: i + 1]) for i in range(len(measures))]
    scores = [known(m.score) if fine else None for m, fine in zip(measures, alive, strict=True)]
    return Result(
        step=tuple(times),
        seconds=tuple(seconds),
        loss=tuple(known(m.loss) if fine else None for m, fine in zip(measures, alive, strict=True)),
        score=None if measures[0].score is None else tuple(scores),
        layers=layers_of(watched, times[1:]),
        path=None if task.landscape is None else tuple(path),
        parameters=sum(p.size for p in training.parameters().values()),
        state_bytes=training.state_bytes(),
        engine=training.engine(),
    )


def begun(task: Task, contestant: Contestant, run: Run) -> Training:
    """The training of a run, before its first step."""
    conditions = Conditions(run.seed, run.batch_size, run.engine, run.device)
    return task.start(contestant, linear_decay(run.lr, run.steps), conditions)


def going(measures: Sequence[Measure]) -> bool:
    """Whether a run is still worth going on with."""
    return abs(measures[-1].loss) <= DIVERGED * max(1.0, abs(measures[0].loss))


def linear_decay(lr: float, steps: int) -> Schedule:
    """From lr at step 1 down to lr / steps at the last, so that no one is judged amid its noise."""
    return lambda t: lr * (steps + 1 - t) / steps


def measuring_times(steps: int) -> list[int]:
    """The beginning, the end, and what divides the steps between them as evenly as whole numbers can."""
    points = min(steps, POINTS)
    return [round(i * steps / points) for i in range(points + 1)]


def place(params: Mapping[str, Array]) -> tuple[float, float]:
    """Where a task in the plane stands: its two numbers."""
    x, y = np.concatenate([p.ravel() for p in params.values()]).tolist()
    return x, y


def watch(
    before: Mapping[str, Array], after: Mapping[str, Array], figures: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[float, float | None]]:
    """For each parameter the size of its step, relative to its own, and its trust ratio if there is one."""
    found = {}
    for name, p in before.items():
        size = root_mean_square(p)
        step = root_mean_square(after[name] - p)
        ratio = figures.get(name, {}).get("trust_ratio")
        trust = None if ratio is None else float(np.mean(np.asarray(ratio, np.float64)))
        found[name] = (step / size if size > 0 else math.nan, trust)
    return found


def root_mean_square(x: Array) -> float:
    with np.errstate(all="ignore"):
        return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def layers_of(watched: Sequence[Mapping[str, tuple[float, float | None]]], times: Sequence[int]) -> Layers | None:
    if not watched:
        return None
    names = tuple(watched[0])
    has_trust = any(trust is not None for _, trust in watched[0].values())
    return Layers(
        names=names,
        step=tuple(times[: len(watched)]),
        update=tuple(tuple(known(moment[name][0]) for moment in watched) for name in names),
        trust=tuple(tuple(known(moment[name][1]) for moment in watched) for name in names) if has_trust else None,
    )


def known(x: float | None) -> float | None:
    """A number that can be written down; None for what is infinite or no number."""
    return x if x is not None and math.isfinite(x) else None
