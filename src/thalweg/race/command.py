"""``thalweg race``: run, print a table, write the report."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from thalweg.show.arguments import parse_option, split_words
from thalweg.show.console import aside, console, make_table
from thalweg.show.extras import extra, need

if TYPE_CHECKING:
    from thalweg.race.contest import Race
    from thalweg.race.run import Run
    from thalweg.race.summary import Summary

with extra("cli"):
    import click
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("race")
@click.argument("task", default="digits")
@click.option("--optimizers", metavar="LIST", help="Race only these: rules, mixtures and import paths, with commas.")
@click.option("--against", multiple=True, metavar="LIST", help="Race these too, as torch.optim.Adam; may be repeated.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="For all, or kron.NAME=VALUE for one.")
@click.option("--steps", type=click.IntRange(1), help="Steps of each run.")
@click.option("--seeds", type=click.IntRange(1), help="Repetitions at the best rates, from seeds 0, 1, ...")
@click.option("--beyond", type=click.IntRange(0), default=3, help="Rates to add for all while a best is at an edge.")
@click.option("--full", is_flag=True, help="Finish every run with every seed, also those that were stopped early.")
@click.option("--device", default="cpu", help="Device of tasks in torch: cpu, cuda, cuda:1.")
@click.option("--out", type=FOLDER, help="Folder of the report.  [default: report; report/TASK if not digits]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
def command(task: str, *, out: Path | None, as_json: bool, **asked: Any) -> None:
    """Race optimizers on a task: each gets the same steps, batches, seeds and number of learning rates.

    TASK is digits, text, or mymodule:task for your own.

    \b
    thalweg race                                     handwritten digits, a minute
    thalweg race text --optimizers adamw,muon_adamw  a small transformer (needs torch)
    thalweg race --option kron.lr=0.001,0.01         rates of your own
    thalweg race --option weight_decay=0.01 --option kron.momentum=0.8
    thalweg race --against torch.optim.Adam,mymodule:Sharp
    thalweg race mymodule:task                       your own problem

    Finished runs are kept in OUT/runs.jsonl: the same command continues a race that was stopped, and where all are
    there it only writes the report again, OUT/index.html.
    """
    folder = out or (Path("report") if task == "digits" else Path("report", task.replace(":", ".")))
    if ":" not in task and "numpy" not in sys.modules:  # small matrices gain nothing from threads
        for library in THREADS:
            os.environ.setdefault(library, "1")
    need("cli", "rich", "plotly")
    from thalweg.race.contest import RECORDS, race
    from thalweg.race.page import write_report

    options: dict[str, dict[str, Any]] = {}
    for owner, name, value in map(parse_option, asked.pop("options")):
        options.setdefault(owner, {})[name] = value
    named = {
        "optimizers": None if asked["optimizers"] is None else split_words(asked["optimizers"], "--optimizers"),
        "against": [word for text in asked["against"] for word in split_words(text, "--against")],
        "options": options,
    }
    ready = race(task, **{**asked, **named}, folder=folder, command=shlex.join(["thalweg", *sys.argv[1:]]))
    if ready.skipped:
        aside().print(f"Lines of {folder / RECORDS} that are no records, and skipped: {ready.skipped}.", markup=False)
    done, total = ready.progress
    if done:
        aside().print(f"{done} of {total} runs are recorded in {folder} already.", markup=False)
    try:
        with show_progress(ready) as on_run:
            summary = ready.run(on_run).summary
    except KeyboardInterrupt:
        done, total = ready.progress
        message = f"{done} of {total} runs are kept in {folder}: the same command continues from there."
        aside().print(f"Stopped. {message}" if done else "Stopped before the first run was finished: nothing is kept.")
        raise
    page = write_report(summary, folder)
    if as_json:
        click.echo(json.dumps(summary))
        return
    console().print(results_table(summary))
    console().print(f"\n{summary['verdict']}\n\nReport: {page}", soft_wrap=True, markup=False)


@contextmanager
def show_progress(race: Race) -> Iterator[Callable[[Run], None]]:
    """A bar of all runs, on a terminal, and what moves it: the function that ``Race.run`` takes."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=aside(), transient=True, disable=not sys.stderr.isatty()) as bars:
        bar = bars.add_task("")

        def move(run: Run | None = None) -> None:
            done, total = race.progress
            current = [f"{run.contestant}  lr {run.lr:g}  seed {run.seed}" for run in race.waiting[:1]]
            bars.update(bar, completed=done, total=total, description="".join(current))

        move()
        yield move


def results_table(summary: Summary) -> Table:
    """Everyone at their best rate, averaged over seeds, least loss first."""
    options = [f"\n{who['options']}" for who in summary["contestants"] if not who["options"].endswith("()")]
    table = make_table(
        title=Text(f"{summary['title']}: {summary['size']}", "bold"),
        caption=Text(summary["conditions"] + "".join(options), "dim"),
        collapse_padding=True,
    )
    for place, title in enumerate(summary["columns"]):
        table.add_column(Text(title), justify="right" if place else "left", no_wrap=not place)
    for row in summary["rows"]:
        cells = [Text(cell["text"], "bold" if cell["is_best"] else "") for cell in row["cells"]]
        table.add_row(Text(row["contestant"], "bold"), *cells)
    return table
