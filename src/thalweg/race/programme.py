"""The programme of a race: its courses, and every run that belongs to them. It is drawn from this and the records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import thalweg
from thalweg.errors import CommandError
from thalweg.race.contestants import CONTESTANTS, RATES, Contestant
from thalweg.race.task import Landscape, Run, Task
from thalweg.show.arguments import check_file

#: Powers of 2 around the learning rate that is expected to be best at another batch size than the task's own.
ELSEWHERE = range(-4, 4)
#: Lines of a map's grid, along x and along y.
GRID = 160


@dataclass(frozen=True, kw_only=True)
class Course:
    """A task at one batch size, and the runs on it."""

    name: str
    task: str
    title: str
    about: str
    batch_size: int | None
    steps: int
    loss_name: str
    score_name: str | None
    #: Which scores are better: the "most", or the "least".
    best_score: str = "most"
    target: float | None
    #: The map of a function of two variables: x, y, value by y and x, and its minima.
    contours: Mapping[str, Any] | None
    #: Everyone at every rate of their grid, from every seed; a sweep chooses among them, and may add rates.
    runs: Sequence[Run]
    #: Whether every run goes to its end, with every seed.
    full: bool = False
    #: How many rates may be added to everyone's grid.
    widen: int = 0
    #: Whose rates were given, and stay as they are.
    fixed: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Programme:
    title: str
    command: str
    #: Name, and the rule and options, of everyone who takes part.
    contestants: Mapping[str, str]
    courses: Sequence[Course]
    #: Those of other libraries.
    rivals: Sequence[str] = ()
    #: Rules and mixtures of the user's own.
    own: Sequence[str] = ()
    #: By name, the options that the user gave, as Python would write them.
    given: Mapping[str, str] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: Path) -> Programme:
        if path.exists():
            check_file(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            others = {*content.get("rivals", ()), *content.get("own", ())}
            if not all(name in others or name in CONTESTANTS for name in content["contestants"]):
                raise ValueError("a contestant is not known")
            courses = [
                Course(**{**course, "runs": [Run(**run) for run in course["runs"]]}) for course in content["courses"]
            ]
            return cls(**{**content, "courses": courses})
        except FileNotFoundError:
            raise CommandError(
                f"{path.parent} has no recorded race to draw: run one first, with --out {path.parent}"
            ) from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CommandError(f"{path} is damaged, or was written by another version: run the race again") from None


def make_course(
    task: Task,
    batch_size: int | None,
    contestants: Sequence[Contestant],
    rates: Mapping[str, Sequence[float]],
    more_rates: Mapping[str, Sequence[float]],
    **conditions: str,
) -> Course:
    """Everyone at every learning rate, from every seed. conditions: the engine and the device."""
    steps = task.steps
    if batch_size is not None and task.batch_size is not None:  # every batch size sees as many examples
        steps = max(1, round(task.steps * task.batch_size / batch_size))
    runs = [
        Run(
            task=task.name,
            fingerprint=task.fingerprint + contestant.fingerprint,
            contestant=contestant.name,
            optimizer=str(prepare(task, contestant)),
            lr=lr,
            seed=seed,
            batch_size=batch_size,
            steps=steps,
            thalweg=thalweg.__version__,
            **conditions,
        )
        for contestant in contestants
        for lr in sorted({*rates_for(task, contestant, rates, batch_size), *rates_of(contestant, more_rates)})
        for seed in range(task.seeds)
    ]
    return Course(
        name=task.name if batch_size is None else f"{task.name}@{batch_size}",
        task=task.name,
        title=task.title or task.name,
        about=task.about,
        batch_size=batch_size,
        steps=steps,
        loss_name=task.loss_name,
        score_name=task.score_name,
        best_score=task.best_score,
        target=task.target,
        contours=None if task.landscape is None else draw_contours(task.landscape),
        runs=runs,
        full=not task.halving,
        widen=task.widen,
        fixed=[contestant.name for contestant in contestants if rates_of(contestant, rates)],
    )


def prepare(task: Task, contestant: Contestant) -> Contestant:
    """A contestant with the options of the task and those of the user."""
    return contestant.with_options({**task.options.get(contestant.name, {}), **contestant.given})


def rates_for(
    task: Task, contestant: Contestant, given: Mapping[str, Sequence[float]], batch_size: int | None
) -> list[float]:
    """The user's rates as they are, or the task's own; of a rival those of its namesake, or of AdamW.

    Those are tuned at the task's own batch size. At another the best is expected to grow with the square root of the
    batch, and looked for around there, in steps of 2.
    """
    if found := rates_of(contestant, given):
        return found
    like = contestant.like or contestant.name
    own = [float(lr) for lr in contestant.rates or task.rates.get(like, RATES[like])]
    if batch_size == task.batch_size or batch_size is None or task.batch_size is None:
        return own
    middle = own[len(own) // 2] * math.sqrt(batch_size / task.batch_size)
    return [float(f"{middle * 2.0**power:.3g}") for power in ELSEWHERE]


def rates_of(contestant: Contestant, rates: Mapping[str, Sequence[float]]) -> list[float]:
    """A contestant's own rates among those given, or those for all."""
    return [float(lr) for lr in rates.get(contestant.name, rates.get("", ()))]


def draw_contours(landscape: Landscape) -> dict[str, Any]:
    x, y = np.linspace(*landscape.x, GRID), np.linspace(*landscape.y, GRID)
    value = landscape.value(*np.meshgrid(x, y))
    return {
        "x": [float(f"{v:.5g}") for v in x],
        "y": [float(f"{v:.5g}") for v in y],
        "value": [[float(f"{v:.4g}") for v in row] for row in value],
        "minima": [list(minimum) for minimum in landscape.minima],
        "log": True,
    }
