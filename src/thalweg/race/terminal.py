"""The race as seen in a terminal: a bar while it runs, a table when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from thalweg.race.run import Watch, measuring_times
from thalweg.race.summary import Summary
from thalweg.race.table import columns_of, describe_conditions, write_cell
from thalweg.race.task import Run
from thalweg.show.console import make_table
from thalweg.show.extras import extra
from thalweg.show.units import count_words

if TYPE_CHECKING:
    from thalweg.race.contest import Race

with extra("cli"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text


@contextmanager
def show_progress(console: Console, race: Race) -> Iterator[tuple[Watch, Callable[[Run], None]]]:
    """A bar of all runs, on a terminal, and what moves it: the two functions that ``Race.run`` takes."""
    now = TextColumn("{task.description}")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        done, total = race.progress
        bar = bars.add_task("", completed=done, total=total)

        def move(run: Run, step: int, loss: float | None) -> None:
            words = "diverged" if loss is None else f"loss {loss:.2e}"
            share = 1 / (len(measuring_times(run.steps)) - 1)
            where = f"{run.contestant}  lr {run.lr:g}  seed {run.seed}  step {step}  {words}"
            bars.update(bar, advance=share, description=where)

        def settle(run: Run) -> None:
            done, total = race.progress
            bars.update(bar, completed=done, total=total)

        yield move, settle


def results_table(summary: Summary) -> Table:
    """Everyone at their best rate, averaged over seeds, least loss first."""
    batches = "" if summary["batch_size"] is None else f", batches of {summary['batch_size']:,}"
    counts = f"{count_words(summary['steps'], 'step')}, {count_words(summary['seeds'], 'seed')}"
    options = [f"\n{who['options']}" for who in summary["contestants"] if not who["options"].endswith("()")]
    table = make_table(
        title=Text(f"{summary['title']}{batches}: {counts}", "bold"),
        caption=Text(describe_conditions(summary) + "".join(options), "dim"),
        collapse_padding=True,
    )
    columns = columns_of(summary)
    table.add_column("optimizer", no_wrap=True)
    for column in columns:
        table.add_column(Text(column.title), justify="right")
    for result in summary["results"]:
        cells = [
            Text(write_cell(column, result), "bold" if column.is_best(result, summary["results"]) else "")
            for column in columns
        ]
        table.add_row(Text(result["contestant"], style="bold"), *cells)
    return table
