"""One run, a contestant at a learning rate from a seed; and its record, a line of ``runs.jsonl``."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from thalweg.race.contestants import Contestant
from thalweg.race.task import Run, Task, find_arrays
from thalweg.show.arguments import check_file

#: A loss that is so many times the first one is as good as infinite.
DIVERGED = 1e6
#: How often a run is measured, beside its beginning, if it has so many steps.
POINTS = 22


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
    times, seconds = measuring_times(run.steps), [0.0]
    first = training.measure(0)
    if not math.isfinite(first.loss):
        raise task.error(f"the loss before the first step is {first.loss}: it must be finite")
    losses: list[float | None] = [first.loss]
    scores = [finite(first.score)]
    for before, until in itertools.pairwise(times):
        spent, loss, score = 0.0, None, None
        if losses[-1] is not None:
            start = time.perf_counter()
            for step in range(before, until):
                training.step(step + 1)
            training.wait()
            spent = time.perf_counter() - start
            measure = training.measure(until)
            if abs(measure.loss) <= DIVERGED * max(1.0, abs(first.loss)):
                loss, score = measure.loss, finite(measure.score)
        seconds.append(seconds[-1] + spent)
        losses.append(loss)
        scores.append(score)
        on_measure(run, until, loss)
        if hopeless(run, until, loss):
            break
    return Result(
        step=times[: len(losses)],
        seconds=seconds,
        loss=losses,
        score=None if first.score is None else scores,
        parameters=training.parameters,
        state_bytes=sum(array.nbytes for array in find_arrays(training.optimizer.state)),
        engine=str(getattr(training.optimizer, "engine", "torch")),
    )


def measuring_times(steps: int) -> list[int]:
    """The beginning, the end, and what divides the steps between them as evenly as whole numbers can."""
    points = min(steps, POINTS)
    return [round(i * steps / points) for i in range(points + 1)]


def finite(x: float | None) -> float | None:
    """A number that can be written down; None for what is infinite or no number."""
    return x if x is not None and math.isfinite(x) else None


def or_infinite(loss: float | None) -> float:
    """A loss to compare: what diverged comes last."""
    return math.inf if loss is None else loss


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
    result = Result(**{each.name: content["result"][each.name] for each in fields(Result)})
    for moment in zip(result.step, result.seconds, result.loss, result.score or result.loss, strict=True):
        math.fsum(number for number in moment if number is not None)
    return Record(Run(**content["run"]), result, dict(content["where"]))


def append_record(path: Path, record: Record) -> None:
    """Add a line; one that was cut off before it is ended first."""
    text = json.dumps({"run": asdict(record.run), "result": asdict(record.result), "where": dict(record.where)})
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and not (b"\n" + path.read_bytes()).endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write(("\n" if cut_off else "") + text + "\n")
