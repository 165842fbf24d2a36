"""The race in a terminal: a bar while it runs, and the table of results, which the report shows too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from thalweg.race.run import Watch
from thalweg.race.summary import Summary, in_percent
from thalweg.race.task import Run
from thalweg.show.console import make_table
from thalweg.show.extras import extra
from thalweg.show.units import count_words, human_bytes, human_seconds, percent, short_number

if TYPE_CHECKING:
    from thalweg.race.contest import Race

with extra("cli"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class Column:
    title: str
    #: The key of a result that stands there, and how its value is written.
    key: str
    write: Callable[[Any], str]
    #: Which values are the best: the "least" or the "most"; "": none is.
    best: str = ""

    def is_best(self, result: Summary, results: Sequence[Summary]) -> bool:
        """Whether it is the best of its column, alone or with others: not where all are equal, nor if it diverged."""
        values = [other[self.key] for other in results if other["loss"] is not None and other[self.key] is not None]
        if not self.best or result["loss"] is None or len(set(values)) < 2:
            return False
        return bool(result[self.key] == (min if self.best == "least" else max)(values))

    def spread(self, result: Summary) -> str:
        """The range over seeds, if there is one."""
        low, high = result.get(f"{self.key}_low"), result.get(f"{self.key}_high")
        if low is None or (low == high and result[self.key] is not None):
            return ""
        return "in some seeds" if result[self.key] is None else f"{self.write(low)} to {self.write(high)}"


def columns_of(summary: Summary) -> list[Column]:
    """Those that a race has something for."""
    target, goal = summary["target"], "" if summary["target"] is None else f" to {summary['target']:g}"
    score = percent if in_percent(summary) else short_number
    columns = [Column("lr", "lr", short_number), Column(summary["loss_name"], "loss", short_number, "least")]
    columns += [Column(summary["score_name"], "score", score, summary["best_score"])] if summary["score_name"] else []
    if target is not None:
        columns.append(Column(f"steps{goal}", "steps_to_target", short_number, "least"))
        columns.append(Column(f"seconds{goal}", "seconds_to_target", human_seconds, "least"))
    return [
        *columns,
        Column("seconds", "seconds", human_seconds, "least"),
        Column("state", "state_bytes", human_bytes, "least"),
    ]


def write_cell(column: Column, result: Summary) -> str:
    value = result[column.key]
    return column.write(value) if value is not None else "diverged" if column.key == "loss" else "–"


def describe_size(summary: Summary) -> str:
    """How much everyone trains."""
    batches = "" if summary["batch_size"] is None else f" with batches of {summary['batch_size']:,}"
    parameters = f", {count_words(summary['results'][0]['parameters'], 'parameter')}" if summary["results"] else ""
    return f"{count_words(summary['steps'], 'step')}{batches}{parameters}; {count_words(summary['seeds'], 'seed')}"


def describe_conditions(summary: Summary) -> str:
    """What is the same for everyone, and how the search went."""
    return (
        f"Each at its best learning rate, by final loss. {summary['search']} Weights do not decay and momentum is "
        "0.9 where a default is 0, unless an option says otherwise. Seconds: training alone, one run at a time."
    )


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
            where = f"{run.contestant}  lr {run.lr:g}  seed {run.seed}  step {step}  {words}"
            bars.update(bar, description=where)

        def settle(run: Run) -> None:
            done, total = race.progress
            bars.update(bar, completed=done, total=total)

        yield move, settle


def results_table(summary: Summary) -> Table:
    """Everyone at their best rate, averaged over seeds, least loss first."""
    options = [f"\n{who['options']}" for who in summary["contestants"] if not who["options"].endswith("()")]
    table = make_table(
        title=Text(f"{summary['title']}: {describe_size(summary)}", "bold"),
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
