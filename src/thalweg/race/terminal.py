"""The race as seen in a terminal: bars while it runs, a table when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import TYPE_CHECKING, Any

from thalweg.race.contestants import CONTESTANTS
from thalweg.race.run import Watch, measuring_times
from thalweg.race.summary import NEAR, Summary
from thalweg.race.table import columns_of
from thalweg.race.task import Run
from thalweg.show.console import make_table
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of
from thalweg.show.units import count_words

if TYPE_CHECKING:
    from thalweg.race.contest import Race

with extra("cli"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

#: Seconds between lines where standard error is no terminal.
PAUSE = 30.0


@contextmanager
def progress_bars(console: Console, race: Race) -> Iterator[tuple[Watch, Callable[[Run], None]]]:
    """One bar for each contestant; gives what moves them. Without a terminal, a line now and then."""
    if not race.waiting:
        yield lambda run, step, loss: None, lambda run: None
        return
    if not console.is_terminal:
        yield progress_lines(console, race), lambda run: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console) as bars:
        names = list(race.contestants)
        width, rivals = max(9, *map(len, names)), [name for name in names if name not in CONTESTANTS]
        tasks = {}
        for name in names:
            # AdamW's own colour is too dark for dark terminals
            shown = f"{name:>{width}}"
            described = shown if name == "AdamW" else f"[{colour_of(name, rivals)}]{shown}[/]"
            tasks[name] = bars.add_task(described, start=False, now="")

        def settle(run: Run | None = None) -> None:
            """Set the bars by the runs that are decided now: there may be more after each."""
            wanted, waiting = race.wanted, race.waiting
            for name, task in tasks.items():
                total, left = (sum(run.contestant == name for run in runs) for runs in (wanted, waiting))
                bars.update(task, total=total, completed=total - left)

        def advance(run: Run, step: int, loss: float | None) -> None:
            task = tasks[run.contestant]
            bars.start_task(task)
            told = "diverged" if loss is None else f"loss {loss:.2e}"
            share = 1 / (len(measuring_times(run.steps)) - 1)
            bars.update(task, advance=share, now=f"lr {run.lr:g}  seed {run.seed}  {told}")

        settle()
        yield advance, settle


def progress_lines(console: Console, race: Race) -> Watch:
    """Say at most once in ``PAUSE`` seconds how far a race is."""
    last = monotonic()

    def advance(run: Run, step: int, loss: float | None) -> None:
        nonlocal last
        if monotonic() - last < PAUSE:
            return
        last, (done, total) = monotonic(), race.progress
        console.print(f"{done} of {total} runs are done; now {run.contestant}, lr {run.lr:g}, seed {run.seed}.")

    return advance


def results_tables(summary: Summary) -> list[Any]:
    """For each course who won, and a table: everyone at their best rate, averaged over seeds, least loss first."""
    notes = asked_notes(summary["contestants"])
    return [
        shown
        for course in summary["courses"]
        if course["results"]
        for shown in (results_table(course, notes), Text(course["verdict"]))
    ]


def asked_notes(contestants: Sequence[Summary]) -> str:
    """Contestants of other libraries, and the options of each: a line for each."""
    told = {who["name"]: who["options"] if who.get("rival") else who.get("given") for who in contestants}
    lines = [words if words.startswith(name) else f"{name}: {words}" for name, words in told.items() if words]
    return "".join(f"\n{line}" for line in lines)


def results_table(course: Summary, notes: str = "") -> Table:
    caption = (
        f"lr: the best of its sweep, by final loss; rates: the factor within which it loses at most "
        f"{NEAR:.0%} of what it won. Seconds: training alone. {course['search']}{edges(course)}{notes}"
    )
    batches = "" if course["batch_size"] is None else f", batches of {course['batch_size']:,}"
    seeds = len(course["seeds"])
    title = f"{course['title']}{batches}: {count_words(course['steps'], 'step')}, {count_words(seeds, 'seed')}"
    # without padding on both sides of a column all of it fits into 80 columns
    table = make_table(title=Text(title, "bold"), caption=Text(caption, "dim"), collapse_padding=True)
    columns = [column for column in columns_of(course) if column.short]
    table.add_column("optimizer", no_wrap=True)
    for column in columns:
        table.add_column(Text(column.short), justify="right")
    for result in course["results"]:
        values = [(column, column.value(result)) for column in columns]
        cells = [column.missing if value is None else column.short_words(value) for column, value in values]
        table.add_row(Text(result["contestant"], style="bold"), *cells)
    return table


def edges(course: Summary) -> str:
    """Whose best learning rate was the least or the largest tried: it might do better beyond."""
    at_edge = [
        result["contestant"]
        for result in course["results"]
        if result["loss"] is not None
        and len(result["sweep"]["lr"]) > 1
        and result["lr"] in (result["sweep"]["lr"][0], result["sweep"]["lr"][-1])
    ]
    return f" At the edge of its rates: {', '.join(at_edge)}." if at_edge else ""
