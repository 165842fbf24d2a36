"""The bench as seen in a terminal: one moving line while it runs, and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from thalweg.bench import words
from thalweg.bench.record import Comparison
from thalweg.bench.rounds import Progress
from thalweg.bench.rules import RULES
from thalweg.show.extras import extra
from thalweg.show.palette import COLOURS

with extra("cli"):
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.table import Table
    from rich.text import Text


class Bar:
    """A bar over all comparisons on one moving line, which makes way for what is printed in between."""

    def __init__(self, bars: Bars, comparisons: int) -> None:
        self._bars, self._finished = bars, 0
        self._task = bars.add_task("", total=comparisons, now="")

    def __call__(self, progress: Progress) -> None:
        shown = f"{RULES[progress.rule].title}, {progress.model}"
        done = self._finished + progress.done
        self._bars.update(self._task, description=shown, completed=done, now=progress.doing)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While a finished comparison is printed."""
        self._finished += 1
        self._bars.stop()
        yield
        self._bars.start()


@contextmanager
def progress_bar(console: Console, comparisons: int) -> Iterator[Bar]:
    """Where nobody watches, nothing is shown."""
    columns = (TextColumn("{task.description}"), BarColumn(24), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield Bar(bars, comparisons)


def show(console: Console, found: Comparison) -> None:
    """A comparison as a table, with what a reader needs to know below it."""
    if found.heats:
        console.print(results_table(found))
        console.print(Text(f"{words.work(found)} {words.bandwidth(found)} {words.disturbance(found)}", style="dim"))
        if found.disturbed:
            console.print(Text(words.NOT_TO_BE_QUOTED, style="bold red"))
    else:
        console.print(Text(f"{words.title(found)}: nobody could run."))
    for remark in words.remarks(found):
        console.print(Text(remark, style="dim"))
    console.print()


def results_table(found: Comparison) -> Table:
    colour = COLOURS[RULES[found.rule].title]
    memory = words.has_memory(found)
    table = Table(title=Text(words.title(found), style="bold"), title_justify="left")
    for number, name in enumerate(words.columns(memory)):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number in (0, 2, 3))
    for row in found.rows:
        style = f"bold {colour}" if row.entrant.package == "thalweg" else ""
        table.add_row(*(Text(cell) for cell in words.cells(row, found.itemsize, memory)), style=style)
    return table
