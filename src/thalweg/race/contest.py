"""The race as a function: what is not recorded yet is run, and recorded as soon as it is finished."""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import thalweg
from thalweg.errors import CommandError
from thalweg.race.contestants import Contestant, default_contestants, enter_all, find_contestant, give_options
from thalweg.race.run import Record, Watch, append_record, execute, read_records
from thalweg.race.summary import Summary, summarize
from thalweg.race.sweep import Sweep, plan, widen
from thalweg.race.task import Run, Task, blame
from thalweg.show.arguments import suggest
from thalweg.show.devices import Device, machine, versions
from thalweg.show.modules import digest_source, import_attribute

#: The tasks that can be raced on by name: modules of this package with a function ``task``.
TASKS = ("digits", "text")
RECORDS = "runs.jsonl"


class Race:
    """A race that is about to be run, into a folder or, without one, into memory alone."""

    def __init__(self, task: Task, command: str, folder: Path | None, beyond: int) -> None:
        self.task, self.command, self.beyond = task, command, beyond
        self.path = None if folder is None else folder / RECORDS
        #: Those that are there already, and how many lines beside them are no records.
        self.records, self.skipped = ({}, 0) if self.path is None else read_records(self.path)
        self.contestants: dict[str, Contestant] = {}
        self.sweeps: dict[str, Sweep] = {}

    def plan(self) -> tuple[list[Run], int]:
        """The runs as far as they are decided, and how many more there will be if no grid has to be widened."""
        widen(self.sweeps.values(), self.beyond)
        return plan(self.sweeps.values())

    @property
    def waiting(self) -> list[Run]:
        """The runs that are decided and not recorded yet, or have to be finished."""
        return [run for run in self.plan()[0] if not self.sweeps[run.contestant].done(run)]

    @property
    def progress(self) -> tuple[int, int]:
        """How many runs are done, and how many there will be, if no grid has to be widened."""
        runs, later = self.plan()
        return len(runs) - len(self.waiting), len(runs) + later

    @property
    def summary(self) -> Summary:
        """What came of the runs that are recorded, as plain data."""
        return summarize(self)

    def run(
        self,
        on_measure: Watch = lambda run, step, loss: None,
        on_run: Callable[[Run], None] = lambda run: None,
    ) -> Race:
        """Run what is waiting, one after another. Interrupted, it leaves every finished run recorded."""
        self.rehearse()
        while waiting := self.waiting:
            run = waiting[0]
            contestant, sweep = self.contestants[run.contestant], self.sweeps[run.contestant]
            result = execute(self.task, contestant, run, on_measure, sweep.hopeless)
            record = Record(run, result, describe_surroundings(run.device))
            if self.path is not None:
                append_record(self.path, record)
            self.records[run] = record
            on_run(run)
        return self

    def rehearse(self) -> None:
        """Take one step with everyone before times are taken: it may fail, and kernels are compiled then."""
        first = {run.contestant: run for run in reversed(self.waiting)}
        for name in self.contestants:
            if name in first:
                self.task.start(self.contestants[name], first[name]).step(1)


def describe_surroundings(device: str) -> dict[str, object]:
    place = Device(device)
    gpu = {} if place.cuda is None else {"gpu": place.describe()}
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "versions": versions(("thalweg", "numpy", "torch")), "machine": {**machine(), **gpu}}


def race(
    task: str | Task = "digits",
    *,
    optimizers: Sequence[Any] | None = None,
    against: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    rates: Mapping[str, Sequence[float]] | None = None,
    beyond: int = 3,
    full: bool = False,
    engine: str = "auto",
    device: str = "cpu",
    folder: str | Path | None = None,
    command: str = "thalweg.race.race(...)",
) -> Race:
    """A race on a task by name or of your own, ready to :meth:`Race.run`.

    optimizers: names, ``module:MyRule``, ``module:function``, import paths such as "torch.optim.Adam", rules or
    ``Contestant``; None takes every rule, and muon_adamw where torch is installed. against: import paths beside them.
    options: by contestant, or under "" for all that have them. rates: likewise, tried as they are instead of a grid.
    beyond: how many more rates every contestant may try while the best of any is at an edge.
    full: finish every run, with every seed, also those that an earlier race stopped.
    folder: where runs are recorded and, if they are there already, taken from.
    """
    known = task if isinstance(task, Task) else find_task(task)
    known = replace(known, steps=known.steps if steps is None else steps, seeds=known.seeds if seeds is None else seeds)
    known.check()
    if not isinstance(beyond, int) or beyond < 0:
        raise CommandError(f"beyond must be a whole number from 0 on, got {beyond!r}")
    contestants = enter_all([*(default_contestants() if optimizers is None else optimizers), *against])
    contestants = give_options(contestants, options or {})
    fixed = {owner and find_contestant(owner, contestants).name: lrs for owner, lrs in (rates or {}).items()}
    for owner, numbers in fixed.items():
        check_rates(owner, numbers)
    ready = Race(known, command, None if folder is None else Path(folder), beyond)
    for contestant in contestants:
        name = contestant.name
        grid = sorted(map(float, fixed.get(name, fixed.get("", contestant.rates))))
        first = Run(
            task=known.name,
            fingerprint=known.fingerprint + contestant.fingerprint,
            contestant=name,
            optimizer=str(contestant),
            lr=grid[0],
            seed=0,
            batch_size=known.batch_size,
            steps=known.steps,
            engine=engine,
            device=device,
            thalweg=thalweg.__version__,
        )
        searches = len(grid) > 1 and not {"", name} & fixed.keys()
        ready.contestants[name] = contestant
        ready.sweeps[name] = Sweep(first, grid, ready.records, known.seeds, full, searches)
    return ready


def check_rates(owner: str, rates: Any) -> None:
    """Raise a CommandError for learning rates that are none."""
    try:
        is_fine = len(rates) > 0 and all(0 < float(lr) < math.inf for lr in rates)
    except (TypeError, ValueError):
        is_fine = False
    if not is_fine:
        raise CommandError(f"rates of {owner or 'all optimizers'} must be positive numbers, got {rates!r}")


def find_task(name: str) -> Task:
    """The task of that name, or one of the user's from ``module:attribute``, which may be a function that makes it."""
    if ":" not in name:
        if name not in TASKS:
            raise CommandError(f"there is no task {name!r} (your own would be mymodule:task): {suggest(name, TASKS)}")
        made: Task = importlib.import_module(f"thalweg.race.{name}").task()
        return made
    value, module = import_attribute(name, "task", "mymodule:task", lambda each: isinstance(each, Task))
    if not isinstance(value, Task) and callable(value):
        with blame(name, "calling it"):
            value = value()
    if not isinstance(value, Task):
        wanted = "an ArrayTask or a ModelTask of thalweg.race, or a function that returns one"
        raise CommandError(f"{name} is a {type(value).__name__} and must be {wanted}")
    return replace(value, fingerprint=value.fingerprint + digest_source(module))
