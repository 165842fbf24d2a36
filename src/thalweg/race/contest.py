"""The race as a function: what is not recorded yet is run, and recorded as soon as it is finished."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.errors import CommandError
from thalweg.race.contestants import CONTESTANTS, Contestant, check_owners, enter, give_options, split_rates
from thalweg.race.programme import Course, Programme, make_programme, prepare
from thalweg.race.records import Book, Damage
from thalweg.race.rivals import enter_rival, list_rivals
from thalweg.race.run import Progress, Record, Result, Run, execute, start_training
from thalweg.race.summary import Summary, summarize
from thalweg.race.sweep import plan
from thalweg.race.task import Task, check_names, check_rates
from thalweg.race.tasks import resolve
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
        self.book = None if folder is None else Book(folder / RECORDS)
        self.records: dict[Run, Record] = {} if self.book is None else dict(self.book.records)

    @property
    def wanted(self) -> list[Run]:
        """The runs of the race as far as they are decided: which rates go on depends on what came of others."""
        return [run for course in self.programme.courses for run in plan(course, self.records).runs]

    @property
    def waiting(self) -> list[Run]:
        """Those that are not recorded yet."""
        return [run for course in self.programme.courses for run in plan(course, self.records).waiting]

    @property
    def progress(self) -> tuple[int, int]:
        """How many runs are done, and how many there will be, if no grid has to be widened."""
        plans = [plan(course, self.records) for course in self.programme.courses]
        total = sum(len(each.runs) + each.later for each in plans)
        return total - sum(len(each.waiting) + each.later for each in plans), total

    @property
    def damaged(self) -> list[Damage]:
        return [] if self.book is None else self.book.damaged

    def run(
        self,
        on_measure: Callable[[Progress], None] = lambda progress: None,
        on_run: Callable[[Run], None] = lambda run: None,
        workers: Workers | None = None,
    ) -> Outcome:
        """Run what is waiting, one after another or by workers. Interrupted, it leaves every finished run recorded."""
        self.rehearse()
        with nullcontext() if self.book is None else self.book.room():
            self._run(on_measure, on_run, workers)
        return Outcome(self.programme, self.records, summarize(self.programme, self.records))

    def _run(
        self, on_measure: Callable[[Progress], None], on_run: Callable[[Run], None], workers: Workers | None
    ) -> None:
        if self.book is not None:
            self.book.mend()
        saved = len(self.waiting) < len(self.wanted)
        if saved:
            self.save_programme()
        for course in self.programme.courses:
            finished = self.run_course(course, on_measure) if workers is None else workers.run(course, self.records)
            for run, result in finished:
                if workers is not None:
                    on_measure(Progress(run, run.steps, result.loss[-1]))
                self.add(Record(run, result, where(self.contestants[run.contestant], run.device)))
                if not saved:  # not before: a race that cannot even begin leaves the one before it to be drawn
                    self.save_programme()
                    saved = True
                on_run(run)

    def run_course(self, course: Course, on_measure: Callable[[Progress], None]) -> Iterator[tuple[Run, Result]]:
        """The runs that a course waits for, each as soon as it is finished: what waits next depends on its record."""
        while (now := plan(course, self.records)).waiting:
            run = now.waiting[0]
            yield run, self.execute(run, on_measure, now.sweeps[run.contestant].hopeless)

    def execute(
        self,
        run: Run,
        on_measure: Callable[[Progress], None] = lambda progress: None,
        hopeless: Callable[[Run, int, float | None], bool] = lambda run, step, loss: False,
    ) -> Result:
        task = self.tasks[run.task]
        return execute(task, prepare(task, self.contestants[run.contestant]), run, on_measure, hopeless)

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
                start_training(self.tasks[run.task], prepare(self.tasks[run.task], contestant), run).step()

    def add(self, record: Record) -> None:
        if self.book is not None:
            self.book.add(record)
        self.records[record.run] = record

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
        check_owners(given, entrants, "rates")
        check_rates(given)
    contestants = give_options(entrants, options)
    for what, count in (("steps", steps), ("seeds", seeds), *(("batch_sizes", size) for size in batch_sizes or ())):
        if count is not None and count < 1:
            raise CommandError(f"{what} must be whole numbers from 1 on, got {count}")
    if beyond is not None and beyond < 0:
        raise CommandError(f"beyond must be a whole number from 0 on, got {beyond}")
    tasks = [task] if isinstance(task, Task) else resolve(task, None if data is None else Path(data), device)
    for each in tasks:
        each.check()
    chosen = make_programme(
        tasks,
        command=command,
        contestants=contestants,
        steps=steps,
        seeds=seeds,
        rates=rates,
        more_rates=more_rates,
        beyond=beyond,
        full=full,
        batch_sizes=batch_sizes,
        engine=engine,
        device=device,
    )
    return Race(tasks, contestants, chosen, None if folder is None else Path(folder))


def enter_contestant(given: str | Contestant) -> Contestant:
    if isinstance(given, Contestant):
        return given
    name = enter(given)
    check_names([name])
    return CONTESTANTS[name]


def load_race(folder: Path) -> tuple[Outcome, list[Damage]]:
    """The race of a folder as far as it has got, without running anything; and the records that are damaged."""
    plan, book = Programme.load(folder / PROGRAMME), Book(folder / RECORDS)
    return Outcome(plan, book.records, summarize(plan, book.records)), book.damaged
