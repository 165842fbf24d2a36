"""``thalweg race``: run, print a table, write the report."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.arguments import parse_option, split_words
from thalweg.show.console import aside, console
from thalweg.show.extras import extra, need

with extra("cli"):
    import click

ENGINES = ("auto", "reference", "foreach", "fused")
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command("race")
@click.argument("task", default="digits")
@click.option("--optimizers", metavar="LIST", help="Race only these: rules, mixtures and import paths, with commas.")
@click.option("--against", multiple=True, metavar="LIST", help="Race these too, as torch.optim.Adam; may be repeated.")
@click.option("--option", "options", multiple=True, metavar="NAME=VALUE", help="For all, or kron.NAME=VALUE for one.")
@click.option("--steps", type=click.IntRange(1), help="Steps of each run.")
@click.option("--seeds", type=click.IntRange(1), help="Repetitions at the best rates, from seeds 0, 1, ...")
@click.option("--lr", "rates", multiple=True, metavar="RATES", help="Rates to try: 0.01,0.1 or lamb,kron=0.003,0.01.")
@click.option("--beyond", type=click.IntRange(0), default=3, help="Rates to add for all while a best is at an edge.")
@click.option("--full", is_flag=True, help="Finish every run with every seed, also those that were stopped early.")
@click.option("--engine", type=click.Choice(ENGINES), default="auto", help="foreach is for tasks in torch.")
@click.option("--device", default="cpu", help="Device of tasks in torch: cpu, cuda, cuda:1.")
@click.option("--out", type=FOLDER, help="Folder of the report.  [default: report; report/TASK if not digits]")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
def command(task: str, *, out: Path | None, as_json: bool, **asked: Any) -> None:
    """Race optimizers on a task: each gets the same steps, batches, seeds and number of learning rates.

    TASK is digits, text, or mymodule:task for your own.

    \b
    thalweg race                                     handwritten digits, a minute
    thalweg race text --optimizers adamw,muon_adamw  a small transformer (needs torch)
    thalweg race --lr kron=0.001,0.01 --seeds 5      rates of your own
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
    from thalweg.race.table import results_table, show_progress

    named = {
        "optimizers": None if asked["optimizers"] is None else split_words(asked["optimizers"], "--optimizers"),
        "against": [word for text in asked["against"] for word in split_words(text, "--against")],
        "options": read_options(asked["options"]),
        "rates": read_rates(asked["rates"]),
    }
    ready = race(task, **{**asked, **named}, folder=folder, command=shlex.join(["thalweg", *sys.argv[1:]]))
    if ready.skipped:
        aside().print(f"Lines of {folder / RECORDS} that are no records, and skipped: {ready.skipped}.", markup=False)
    done, total = ready.progress
    if done:
        aside().print(f"{done} of {total} runs are recorded in {folder} already.", markup=False)
    try:
        with show_progress(aside(), ready) as (on_measure, on_run):
            summary = ready.run(on_measure, on_run).summary
    except KeyboardInterrupt:
        done, total = ready.progress
        kept = f"{done} of {total} runs are kept in {folder}: the same command continues from there."
        aside().print(f"Stopped. {kept}" if done else "Stopped before the first run was finished: nothing is kept.")
        raise
    page = write_report(summary, folder)
    if as_json:
        click.echo(json.dumps(summary))
        return
    console().print(results_table(summary))
    console().print(f"\n{summary['verdict']}\n\nReport: {page}", soft_wrap=True, markup=False)


def read_rates(texts: Sequence[str]) -> dict[str, list[float]]:
    """Learning rates by contestant; under "" those for everyone.

    >>> read_rates(["0.1,0.2", "kron,lamb=0.01", "lamb=0.03"])
    {'': [0.1, 0.2], 'kron': [0.01], 'lamb': [0.01, 0.03]}
    """
    rates: dict[str, list[float]] = {}
    for text in texts:
        names, equals, values = text.rpartition("=")
        try:
            numbers = [float(word) for word in split_words(values, "--lr")]
        except ValueError:
            raise CommandError(f"--lr must be a list of numbers, such as 0.01,0.1, got {values!r}") from None
        for owner in split_words(names, "--lr") if equals else [""]:
            rates[owner] = sorted({*rates.get(owner, []), *numbers})
    return rates


def read_options(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by contestant; under "" those for all that have them.

    >>> read_options(["eps=1e-8", "kron.clip=null"])
    {'': {'eps': 1e-08}, 'kron': {'clip': None}}
    """
    options: dict[str, dict[str, Any]] = {}
    for owner, name, value in map(parse_option, texts):
        options.setdefault(owner, {})[name] = value
    return options
