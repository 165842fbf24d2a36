"""The race as a function: what is not recorded yet is run, and recorded as soon as it is finished."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.errors import CommandError
from thalweg.race.contestants import (
    CONTESTANTS,
    Contestant,
    check_owners,
    enter,
    give_options,
    is_packaged,
    split_rates,
    write_options,
)
from thalweg.race.programme import Course, Programme, make_course, prepare
from thalweg.race.records import Book, Damage
from thalweg.race.rivals import enter_rival, list_rivals
from thalweg.race.run import Record, Result, Watch, execute
from thalweg.race.summary import Summary, summarize
from thalweg.race.sweep import Plan, plan
from thalweg.race.task import Run, Task, check_names, check_rates
from thalweg.race.tasks import resolve
from thalweg.show.arguments import Given
from thalweg.show.devices import Device, machine, versions

if TYPE_CHECKING:
    from thalweg.race.workers import Workers

RECORDS, PROGRAMME = "runs.jsonl", "race.json"
PACKAGES = ("thalweg", "numpy", "torch")


@dataclass(frozen=True)
class Outcome:
    """A finished race."""

    programme: Programme
    records: Mapping[Run, Record]
    summary: Summary


class Race:
    """A race that is about to be run, into a folder or, without one, into memory alone."""

    def __init__(
        self, tasks: Sequence[Task], contestants: Sequence[Contestant], programme: Programme, folder: Path | None
    ) -> None:
        self.tasks = {task.name: task for task in tasks}
        self.contestants = {contestant.name: contestant for contestant in contestants}
        self.programme, self.folder = programme, folder
        self.book = Book(None if folder is None else folder / RECORDS)
        self.records, self.damaged = self.book.records, self.book.damaged

    @property
    def plans(self) -> list[Plan]:
        """The runs of each course as far as they are decided: which rates go on depends on what came of others."""
        return [plan(course, self.records) for course in self.programme.courses]

    @property
    def wanted(self) -> list[Run]:
        return [run for each in self.plans for run in each.runs]

    @property
    def waiting(self) -> list[Run]:
        """Those that are not recorded yet."""
        return [run for each in self.plans for run in each.waiting]

    @property
    def progress(self) -> tuple[int, int]:
        """How many runs are done, and how many there will be, if no grid has to be widened."""
        plans = self.plans
        return sum(len(each.runs) - len(each.waiting) for each in plans), sum(len(p.runs) + p.later for p in plans)

    def run(
        self,
        on_measure: Watch = lambda run, step, loss: None,
        on_run: Callable[[Run], None] = lambda run: None,
        workers: Workers | None = None,
    ) -> Outcome:
        """Run what is waiting, one after another or by workers. Interrupted, it leaves every finished run recorded."""
        self.rehearse()
        with self.book.room():
            self.book.mend()
            # else not before the first run: a race that cannot even begin leaves the one before it to be drawn
            saved = len(self.waiting) < len(self.wanted)
            if saved:
                self.save_programme()
            for course in self.programme.courses:
                finished = self.run_course(course, on_measure) if workers is None else workers.run(course, self.records)
                for run, result in finished:
                    if workers is not None:
                        on_measure(run, run.steps, result.loss[-1])
                    self.book.add(Record(run, result, where(self.contestants[run.contestant], run.device)))
                    if not saved:
                        self.save_programme()
                        saved = True
                    on_run(run)
        return Outcome(self.programme, self.records, summarize(self.programme, self.records))

    def run_course(self, course: Course, on_measure: Watch) -> Iterator[tuple[Run, Result]]:
        """The runs that a course waits for, each as soon as it is finished: what waits next depends on its record."""
        while (now := plan(course, self.records)).waiting:
            run = now.waiting[0]
            yield run, self.execute(run, on_measure=on_measure, hopeless=now.sweeps[run.contestant].hopeless)

    def execute(self, run: Run, **watch: Watch) -> Result:
        """watch: ``on_measure`` and ``hopeless`` of ``run.execute``."""
        task = self.tasks[run.task]
        return execute(task, prepare(task, self.contestants[run.contestant]), run, **watch)

    def rehearse(self) -> None:
        """Take one step with every optimizer that has options or an engine of the user's or is not a rule: it may fail.

        On a GPU with everyone, at every batch size: kernels are compiled before times are taken.
        """
        seen = set()
        for run in self.waiting:
            contestant = self.contestants[run.contestant]
            doubtful = contestant.given or contestant.kind != "rule" or (run.engine, run.device) != ("auto", "cpu")
            if doubtful and (run.task, run.batch_size, run.contestant) not in seen:
                seen.add((run.task, run.batch_size, run.contestant))
                task = self.tasks[run.task]
                task.start(prepare(task, contestant), run).step()

    def save_programme(self) -> None:
        if self.folder is not None:
            self.programme.save(self.folder / PROGRAMME)


def where(contestant: Contestant, device: str) -> dict[str, object]:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    packages = [*PACKAGES, *([contestant.rule.partition(".")[0]] if contestant.is_rival else [])]
    place = Device(device)
    gpu = {} if place.cuda is None else {"gpu": place.describe()}
    return {"date": date, "versions": versions(packages), "machine": {**machine(), **gpu}}


def race(
    task: str | Task = "digits",
    *,
    optimizers: Sequence[str | Contestant] | None = None,
    against: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
    steps: int | None = None,
    seeds: int | None = None,
    rates: Mapping[str, Sequence[float]] | None = None,
    more_rates: Mapping[str, Sequence[float]] | None = None,
    beyond: int | None = None,
    full: bool = False,
    batch_sizes: Sequence[int] | None = None,
    engine: str = "auto",
    device: str = "cpu",
    data: str | Path | None = None,
    folder: str | Path | None = None,
    command: str = "thalweg.race.race(...)",
) -> Race:
    """A race on a task by name or of your own, ready to :meth:`Race.run`.

    optimizers: names, ``module:MyRule``, ``module:function`` or ``Contestant``; None takes every rule.
    against: optimizers of other libraries by import name, such as "torch.optim.Adam", or by package, such as "timm".
    options: by contestant, or under "" for all that have them. rates: likewise, instead of the task's own, and tried as
    they are; more_rates: likewise, beside the task's own.
    beyond: how many more rates every contestant may try while the best of any is at an edge; None: as the task says.
    full: finish every run, with every seed, also those that an earlier race stopped.
    steps: of each run at the task's own batch size.
    folder: where runs are recorded and, if they are there already, taken from.
    """
    ours = [enter_contestant(each) for each in optimizers or CONTESTANTS]
    entrants = [*ours, *map(enter_rival, list_rivals(against, [each.name for each in ours]))]
    options, rates = split_rates(options or {}, rates or {})
    for given in (rates, more_rates or {}):
        check_owners([Given(owner, "lr", lr) for owner, lr in given.items() if owner], entrants)
        check_rates(given)
    contestants = give_options(entrants, options)
    for size in batch_sizes or ():
        if size < 1:
            raise CommandError(f"batch_sizes must be whole numbers from 1 on, got {size}")
    if beyond is not None and beyond < 0:
        raise CommandError(f"beyond must be a whole number from 0 on, got {beyond}")
    instead = {"steps": steps, "seeds": seeds, "widen": beyond, "halving": False if full else None}
    changes: dict[str, Any] = {name: value for name, value in instead.items() if value is not None}
    known = [task] if isinstance(task, Task) else resolve(task, None if data is None else Path(data), device)
    tasks, courses = [replace(each, **changes) for each in known], []
    for each in tasks:
        each.check()
        if batch_sizes and each.batch_size is None:
            raise CommandError(f"task {each.name!r} has no batches: leave out --batch")
        sizes: Sequence[int | None] = batch_sizes or [each.batch_size]
        courses += [
            make_course(each, size, contestants, rates, more_rates or {}, engine=engine, device=device)
            for size in sizes
        ]
    programme = Programme(
        title=tasks[0].title or tasks[0].name if len(tasks) == 1 else "Down the valley",
        command=command,
        contestants={each.name: str(prepare(tasks[0], each)) for each in contestants},
        courses=courses,
        rivals=[each.name for each in contestants if each.is_rival],
        own=[each.name for each in contestants if not each.is_rival and not is_packaged(each)],
        given={each.name: write_options(each.given) for each in contestants if each.given},
    )
    return Race(tasks, contestants, programme, None if folder is None else Path(folder))


def enter_contestant(given: str | Contestant) -> Contestant:
    if isinstance(given, Contestant):
        return given
    name = enter(given)
    check_names([name])
    return CONTESTANTS[name]


def load_race(folder: Path) -> tuple[Outcome, list[Damage]]:
    """The race of a folder as far as it has got, without running anything; and the records that are damaged."""
    programme, book = Programme.load(folder / PROGRAMME), Book(folder / RECORDS)
    return Outcome(programme, book.records, summarize(programme, book.records)), book.damaged
