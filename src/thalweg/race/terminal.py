"""The race as seen in a terminal: bars while it runs, a table when it is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from thalweg.race.contestants import Contestant
from thalweg.race.run import Progress, Record, mean_final_accuracy, mean_final_loss
from thalweg.show.extras import extra

with extra("cli"):
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars
    from rich.table import Table


@contextmanager
def progress_bars(
    console: Console, contestants: Sequence[Contestant], *, epochs: int, seeds: Sequence[int]
) -> Iterator[Callable[[Progress], None]]:
    """One bar for each contestant; gives what moves them, to be called after each epoch."""
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Bars(*columns, console=console) as bars:
        tasks = {
            c.name: bars.add_task(
                f"[{c.colour}]{c.name}[/]", total=len(c.rates) * len(seeds) * epochs, start=False, now=""
            )
            for c in contestants
        }

        def advance(progress: Progress) -> None:
            task = tasks[progress.contestant]
            bars.start_task(task)
            bars.update(task, advance=1, now=f"lr {progress.lr:g}  seed {progress.seed}  loss {progress.loss:.2e}")

        yield advance


def results_table(best: Mapping[str, Sequence[Record]]) -> Table:
    """Each contestant at its best learning rate, averaged over seeds, least training loss first."""
    table = Table(caption="lr: the one with the least final training loss in the sweep; seconds: one run")
    for title in ("contestant", "lr", "training loss", "test accuracy", "seconds", "state bytes / parameter"):
        table.add_column(title, justify="left" if title == "contestant" else "right")
    for name, records in sorted(best.items(), key=lambda item: mean_final_loss(item[1])):
        table.add_row(
            name,
            f"{records[0].lr:g}",
            f"{mean_final_loss(records):.2e}",
            f"{mean_final_accuracy(records):.1%}",
            f"{sum(record.seconds for record in records) / len(records):.2f}",
            f"{records[0].state_bytes_per_parameter:.2f}",
        )
    return table
