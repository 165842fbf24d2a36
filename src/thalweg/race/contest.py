"""The race as a function: what is not recorded yet is run, and recorded as soon as it is finished."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import thalweg
from thalweg.errors import CommandError
from thalweg.race.contestants import enter_all
from thalweg.race.run import Record, Run, Training, append_record, execute, read_records
from thalweg.race.summary import Summary, describe, summarize
from thalweg.race.sweep import Sweep, plan
from thalweg.race.task import Task, blame
from thalweg.show.arguments import suggest
from thalweg.show.devices import Device, machine, versions
from thalweg.show.modules import digest_source, import_attribute

#: The tasks that can be raced on by name, and where they are.
TASKS = {name: f"thalweg.race.{name}:task" for name in ("digits", "text")}
RECORDS = "runs.jsonl"


class Race:
    """A race that is about to be run, into a folder or, without one, into memory alone."""

    def __init__(self, task: Task, command: str, folder: Path | None, beyond: int) -> None:
        self.task, self.command, self.beyond = task, command, beyond
        self.path = None if folder is None else folder / RECORDS
        #: Those that are there already, and how many lines beside them are no records.
        self.records, self.skipped = ({}, 0) if self.path is None else read_records(self.path)
        self.sweeps: dict[str, Sweep] = {}

    def plan(self) -> list[Run]:
        """The runs as far as they are decided."""
        return plan(self.sweeps.values(), self.beyond)

    @property
    def waiting(self) -> list[Run]:
        """The runs that are decided and not recorded yet, or have to be finished."""
        return [run for run in self.plan() if not self.sweeps[run.contestant].is_done(run)]

    @property
    def progress(self) -> tuple[int, int]:
        """How many runs are done, and how many are decided so far."""
        runs = self.plan()
        return sum(self.sweeps[run.contestant].is_done(run) for run in runs), len(runs)

    @property
    def summary(self) -> Summary:
        """What came of the runs that are recorded, as plain data."""
        return describe(summarize(self))

    def run(self, on_run: Callable[[Run], None] = lambda run: None) -> Race:
        """Run what is waiting, one after another. Interrupted, it leaves every finished run recorded.

        on_run: called with each run that is finished.
        """
        self.rehearse()
        while waiting := self.waiting:
            run = waiting[0]
            sweep = self.sweeps[run.contestant]
            result = execute(self.task, sweep.contestant, run, sweep.is_hopeless)
            record = Record(run, result, describe_surroundings(run.device))
            if self.path is not None:
                append_record(self.path, record)
            self.records[run] = record
            on_run(run)
        return self

    def rehearse(self) -> None:
        """Take one step with everyone before times are taken: it may fail, and kernels are compiled then."""
        first = {run.contestant: run for run in self.waiting[::-1]}
        for name in sorted(first, key=list(self.sweeps).index):
            Training(self.task, self.sweeps[name].contestant, first[name]).step(1)


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
    beyond: int = 3,
    full: bool = False,
    device: str = "cpu",
    folder: str | Path | None = None,
    command: str = "thalweg.race.race(...)",
) -> Race:
    """A race on a task by name or of your own, ready to :meth:`Race.run`.

    optimizers: names, ``module:MyRule``, ``module:function``, import paths such as "torch.optim.Adam", rules or
    ``Contestant``; None takes every rule, and muon_adamw where torch is installed. against: import paths beside them.
    options: by contestant, or under "" for all that have them; ``lr``, one or several, is tried instead of a grid.
    beyond: how many more rates every contestant may try while the best of any is at an edge.
    full: finish every run, with every seed, also those that an earlier race stopped.
    folder: where runs are recorded and, if they are there already, taken from.
    """
    raced = task if isinstance(task, Task) else find_task(task)
    raced = replace(raced, steps=raced.steps if steps is None else steps, seeds=raced.seeds if seeds is None else seeds)
    raced.check()
    if not isinstance(beyond, int) or beyond < 0:
        raise CommandError(f"beyond must be a whole number from 0 on, got {beyond!r}")
    ready = Race(raced, command, None if folder is None else Path(folder), beyond)
    for contestant in enter_all(optimizers, against, options or {}):
        first = Run(
            task=raced.name,
            fingerprint=raced.fingerprint + contestant.fingerprint,
            contestant=contestant.name,
            optimizer=str(contestant),
            lr=contestant.rates[0],
            seed=0,
            batch_size=raced.batch_size,
            steps=raced.steps,
            device=device,
            thalweg=thalweg.__version__,
        )
        ready.sweeps[contestant.name] = Sweep(contestant, first, ready.records, raced.seeds, full)
    return ready


def find_task(name: str) -> Task:
    """The task of that name, or one of the user's from ``module:attribute``, which may be a function that makes it."""
    if ":" not in name and name not in TASKS:
        raise CommandError(f"there is no task {name!r} (your own would be mymodule:task): {suggest(name, TASKS)}")
    path = TASKS.get(name, name)
    value, module = import_attribute(path, "task", "mymodule:task", lambda candidate: isinstance(candidate, Task))
    if not isinstance(value, Task) and callable(value):
        with blame(name, "calling it"):
            value = value()
    if not isinstance(value, Task):
        wanted = "an ArrayTask or a ModelTask of thalweg.race, or a function that returns one"
        raise CommandError(f"{name} is a {type(value).__name__} and must be {wanted}")
    return replace(value, fingerprint=value.fingerprint + digest_source(module))
