"""``thalweg race``: run, print a table, draw."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.race import TASKS
from thalweg.race.contestants import CONTESTANTS, MIXTURES, enter
from thalweg.show.arguments import choose_names, parse_counts, parse_option, split_words
from thalweg.show.choices import complete_list, complete_one, json_option, option_option
from thalweg.show.console import aside, console
from thalweg.show.extras import extra, need
from thalweg.show.registered import ENGINES, OWN

with extra("cli"):
    import click

#: Matrices this small gain nothing from threads, which stall when others want the cores.
SMALL = ("digits", "valley", "text")
#: Tasks in numpy: their runs do not get in one another's way, if each has a core.
PLAIN = ("digits", "valley")
#: What draws pictures, and the report.
DRAWN_BY = ("matplotlib", "plotly")
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@click.command("race")
@click.argument("task", default="digits", shell_complete=complete_one(TASKS))
@click.option(
    "--optimizers",
    metavar="LIST",
    shell_complete=complete_list([*CONTESTANTS, *MIXTURES]),
    help="Race only these, separated by commas: rules, muon_adamw, kron_adamw, or your own as module:MyRule or "
    "module:function, which makes an optimizer for a model.",
)
@click.option(
    "--against",
    multiple=True,
    metavar="LIST",
    help="Race these of other libraries too, by import name or package: torch.optim.Adam,timm,mymodule:Class; may be "
    "repeated.",
)
@option_option
@click.option("--steps", type=click.IntRange(1), help="Steps of each run, at the task's own batch size.")
@click.option("--seeds", type=click.IntRange(1), help="Repetitions of each run, from seeds 0, 1, ...")
@click.option("--lr", "rates", multiple=True, metavar="RATES", help="Rates to try: 0.01,0.1 or lamb,kron=0.003,0.01.")
@click.option("--more-lr", "more_rates", multiple=True, metavar="RATES", help="Rates to try beside the task's own.")
@click.option("--beyond", type=click.IntRange(0), help="Rates to add to everyone's while a best one is at an edge.")
@click.option("--full", is_flag=True, help="Finish every run with every seed, also those that were stopped early.")
@click.option(
    "--batch",
    "--batch-size",
    "batch_sizes",
    metavar="SIZES",
    help="One or several, separated by commas; all see as many examples.",
)
@click.option(
    "--engine", type=click.Choice(ENGINES), default="auto", show_default=True, help="foreach is for tasks in torch."
)
@click.option("--device", default="cpu", show_default=True, help="Device of tasks in torch: cpu, cuda, cuda:1.")
@click.option("--data", type=click.Path(path_type=Path), help="Folder of Fashion-MNIST's files, for the task fashion.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of the report.  [default: report; report/TASK if not digits]",
)
@click.option("--redraw", is_flag=True, help="Draw the last race of that folder from its records, and run nothing.")
@json_option
def command(task: str, *, out: Path | None, redraw: bool, as_json: bool, **asked: Any) -> None:
    """Race optimizers on a task: each gets the same steps, batches, seeds and number of learning rates.

    TASK is digits, valley, text, fashion, or mymodule:task for your own.

    \b
    thalweg race                                     handwritten digits, numpy alone, a minute or two
    thalweg race valley                              paths down test functions of two variables
    thalweg race text --optimizers adamw,muon_adamw  a small transformer (needs torch)
    thalweg race fashion --data FOLDER --device cuda --batch 512,2048,8192 --against torch,timm
    thalweg race --batch 32,128,512                  how they compare as batches grow
    thalweg race --lr kron=0.001,0.01 --seeds 5      rates of your own
    thalweg race --more-lr kron=0.02 --full          go on with the race of that folder
    thalweg race --option weight_decay=0.01 --option kron.momentum=0.8
    thalweg race --against torch.optim.Adam,mymodule:Sharp
    thalweg race mymodule:task                       your own problem
    thalweg race --redraw                            draw again, run nothing

    Finished runs are kept in OUT/runs.jsonl: the same command continues a race that was stopped.
    OUT/index.html is the report; the pictures beside it are PNG and SVG.
    """
    folder = out or (Path("report") if task == "digits" else Path("report", task.replace(":", ".")))
    if task in SMALL and "numpy" not in sys.modules:
        for library in THREADS:  # it has to be said before numpy is loaded
            os.environ.setdefault(library, "1")
    need("cli", "rich")
    from thalweg.race.contest import load_race, race
    from thalweg.race.rivals import list_rivals, names_by_word
    from thalweg.race.terminal import progress_bars
    from thalweg.race.workers import Workers, count_workers

    if redraw:
        need("cli", *DRAWN_BY)
        outcome, damaged = load_race(folder)
        tell_damage(damaged, "left out")
    else:
        ours = None if asked["optimizers"] is None else asked_optimizers(asked["optimizers"])
        theirs = [word for text in asked["against"] for word in split_words(text, "--against")]
        by_word = names_by_word(list_rivals(theirs, ours or list(CONTESTANTS)))
        sizes = asked["batch_sizes"]
        arguments = {
            **asked,  # by the names that race() has for them
            "task": task,
            "against": theirs,
            "options": options_given(asked["options"], by_word),
            "optimizers": ours,
            "rates": rates_given(asked["rates"], by_word),
            "more_rates": rates_given(asked["more_rates"], by_word, "--more-lr"),
            "batch_sizes": None if sizes is None else parse_counts(sizes, "batch sizes"),
        }
        ready = race(**arguments, folder=folder, command=shlex.join(["thalweg", *sys.argv[1:]]))
        tell_damage(ready.damaged, "done again")
        if missing := not_drawn():
            aside().print(f"{missing} is not installed: the race is run and recorded, but not drawn.")
        done, total = ready.progress
        if done:
            aside().print(f"{done} of {total} runs are recorded in {folder} already.")
        try:
            # those that a worker would have to import first run here
            shared = task in PLAIN and not theirs and set(ours or ()) <= set(CONTESTANTS)
            count = count_workers(ready) if shared else 1
            with (
                Workers(count, arguments) if count > 1 else nullcontext() as workers,
                progress_bars(aside(), ready) as (on_measure, on_run),
            ):
                outcome = ready.run(on_measure, on_run, workers)
        except KeyboardInterrupt:
            kept, total = ready.progress
            aside().print(
                f"Stopped. {kept} of {total} runs are kept in {folder}: the same command continues from "
                "there, and with --redraw it draws the finished runs."
                if kept
                else "Stopped before the first run was finished: nothing is kept."
            )
            raise
    show(outcome.summary, folder, as_json=as_json)


def asked_optimizers(text: str) -> list[str]:
    """The names under which optimizers race; the user's own are imported."""
    found = [str(enter(word)) for word in split_words(text, "optimizer")]
    return choose_names(",".join(found), [*CONTESTANTS, *MIXTURES, *OWN], "optimizer")


def show(summary: Any, folder: Path, *, as_json: bool) -> None:
    """Draw, then print. Where what draws is not installed, say how to draw elsewhere."""
    from thalweg.race.terminal import results_tables

    if not any(course["results"] for course in summary["courses"]):
        raise CommandError(f"no run is recorded in {folder} yet: there is nothing to draw")
    if missing := not_drawn():
        again = shlex.join(["thalweg", "race", "--redraw", "--out", str(folder)])
        told = (
            f"Recorded in {folder}. Not drawn, because {missing} is not installed: after pip install "
            f'"thalweg[cli]", here or elsewhere with a copy of that folder, `{again}` draws it.'
        )
    else:
        from thalweg.race.draw import draw
        from thalweg.race.page import write

        pictures = draw(summary, folder)
        page = folder / "index.html"
        write(summary, page)
        told = f"Report: {page}. Pictures: {', '.join(path.name for path in pictures)}."
    if as_json:
        click.echo(json.dumps(summary))
        return
    printer = console()
    for table in results_tables(summary):
        printer.print(table)
        printer.print()
    if missing := summary["missing"]:
        printer.print(f"{missing} {'run is' if missing == 1 else 'runs are'} missing: the race is not finished.")
    printer.print(told, soft_wrap=True, markup=False)


def not_drawn() -> str:
    """What draws and is not installed."""
    return " and ".join(name for name in DRAWN_BY if importlib.util.find_spec(name) is None)


def tell_damage(damaged: Sequence[Any], consequence: str) -> None:
    for damage in damaged:
        aside().print(f"runs.jsonl, line {damage.line}, is damaged and {consequence}: {damage.why}", markup=False)


def rates_given(texts: Sequence[str], by_word: Mapping[str, str], flag: str = "--lr") -> dict[str, list[float]]:
    """Learning rates by contestant; under "" those for everyone.

    >>> rates_given(["0.1,0.2", "kron,lamb=0.01", "lamb=0.03"], {"LAMB": "LAMB", "Kron": "Kron"})
    {'': [0.1, 0.2], 'Kron': [0.01], 'LAMB': [0.01, 0.03]}
    """
    found: dict[str, set[float]] = {}
    for text in texts:
        names, equals, values = text.rpartition("=")
        for word in choose_names(names, list(by_word), "optimizer") if equals else [""]:
            found.setdefault(by_word.get(word, ""), set()).update(
                rate(value, flag) for value in split_words(values, flag)
            )
    return {owner: sorted(rates) for owner, rates in found.items()}


def options_given(texts: Sequence[str], by_word: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Options by contestant; under "" those for all that have them.

    >>> options_given(["eps=1e-8", "kron.clip=null"], {"LAMB": "LAMB", "Kron": "Kron"})
    {'': {'eps': 1e-08}, 'Kron': {'clip': None}}
    """
    found: dict[str, dict[str, Any]] = {}
    for owner, name, value in map(parse_option, texts):
        for word in choose_names(owner, list(by_word), "optimizer") if owner else [""]:
            found.setdefault(by_word.get(word, ""), {})[name] = value
    return found


def rate(word: str, flag: str) -> float:
    try:
        lr = float(word)
    except ValueError:
        lr = 0.0
    if not 0 < lr < float("inf"):
        raise CommandError(f"{flag} must be a list of positive numbers, such as 0.01,0.1, got {word!r}")
    return lr
