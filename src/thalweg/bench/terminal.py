"""The bench as seen in a terminal: one moving line while it runs, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from thalweg.bench import words
from thalweg.bench.record import Bench, Comparison
from thalweg.bench.rounds import Progress
from thalweg.bench.rules import RULES
from thalweg.show.extras import extra
from thalweg.show.palette import colour_of

with extra("cli"):
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.table import Table
    from rich.text import Text

#: What a narrow terminal can do without, in this order.
LEAST_NEEDED = (
    "of the parameters",
    "GB/s at the floor",
    "engine",
    "quartiles, ms",
    "extra memory",
    "share of the floor",
)
#: Columns of the terminal between two of the table.
BETWEEN = 3


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
    if found.entrants:
        console.print(results_table(found, console.width))
        console.print(Text(f"{words.work(found)} {words.bandwidth(found)} {words.disturbance(found)}", style="dim"))
        if found.disturbed:
            console.print(Text(words.NOT_TO_BE_QUOTED, style="bold red"))
    else:
        console.print(Text(f"{words.title(found)}: nobody could run."))
    for remark in words.remarks(found):
        console.print(Text(remark, style="dim"))
    console.print()


def show_surroundings(console: Console, found: Bench) -> None:
    """Below all tables: where, when and with what they were measured."""
    console.print(Text(words.surroundings(found), style="dim"))


def results_table(found: Comparison, width: int) -> Table:
    """With all columns, or with those that matter most where the terminal is narrow: the files have them all."""
    memory = words.has_memory(found)
    titles, rows = words.columns(memory), [words.cells(row, found.itemsize, memory) for row in found.rows]
    kept = fitting(titles, rows, width)
    left_out = [title for title in titles if title not in kept]
    table = Table(
        title=Text(words.title(found), style="bold"),
        title_justify="left",
        caption=Text(f"In bench.md only: {'; '.join(left_out)}.", "dim") if left_out else None,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for title, room in kept.items():
        table.add_column(title, justify="left" if title in titles[:2] else "right", width=room)
    for row, cells in zip(found.rows, rows, strict=True):
        style = f"bold {colour_of(RULES[found.rule].title)}" if row.entrant.package == "thalweg" else ""
        table.add_row(
            *(Text(cell, no_wrap=True) for t, cell in zip(titles, cells, strict=True) if t in kept), style=style
        )
    return table


def fitting(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> dict[str, int]:
    """The columns that there is room for, and the width of each: titles are broken into words first, then left out."""
    cells = {title: max(len(row[place]) for row in rows) for place, title in enumerate(titles)}
    whole = {title: max(room, len(title)) for title, room in cells.items()}
    if total(whole) <= width:
        return whole
    broken = {title: max(room, *map(len, title.split())) for title, room in cells.items()}
    for title in LEAST_NEEDED:
        if total(broken) > width:
            broken.pop(title, None)
    return broken


def total(columns: Mapping[str, int]) -> int:
    return sum(columns.values()) + BETWEEN * (len(columns) - 1)
