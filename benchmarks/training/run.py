"""Race every contestant of the suite on every task, and record each run.

    python -m benchmarks.training.run --device cuda --data FOLDER --records FOLDER --seeds 3

``--records`` has one folder a task, as ``thalweg race --out`` makes it. Runs that it holds already are not run again,
so that the same command goes on after Ctrl-C. FOLDER of --data is where torchvision keeps Fashion-MNIST, and where
tokens are kept. On a GPU the forward and backward pass is one graph, compiled; optimizers step as users would have
them step.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.training.contestants import CONTESTANTS, enter
from benchmarks.training.tasks import TASKS, check_task, make_task
from thalweg.errors import CommandError
from thalweg.race.command import results_table, show_progress
from thalweg.race.contest import Race, race
from thalweg.race.task import Task
from thalweg.show.arguments import split_words
from thalweg.show.console import aside, console

#: What is written down of a task.
DESCRIPTION = ("title", "about", "steps", "batch_size", "loss_name", "score_name", "best_score")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.run", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument("--contestants", default="*", help="globs of names, with ; between them (default: all)")
    parser.add_argument(
        "--beyond", type=int, default=1, help="rates to add to everyone's while a best one is at an edge"
    )
    parser.add_argument("--search-steps", type=int, help="search rates in runs of so many steps, and train at the best")
    parser.add_argument("--seeds", type=int, default=1, help="seeds at the best rates (default: %(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="folder of Fashion-MNIST and of tokens")
    parser.add_argument("--records", type=Path, required=True, help="folder where runs are recorded, a folder a task")
    parser.add_argument("--steps", type=int, help="other steps than the task's")
    parser.add_argument("--tiny", action="store_true", help="small models and data, to try the scripts")
    return parser.parse_args(arguments)


def choose_contestants(text: str) -> list[str]:
    """Everyone whom a glob matches, once; a glob that matches nobody is a mistake.

    >>> choose_contestants("LAMB*; Kron")
    ['LAMB', 'LAMB paper', 'LAMB, norms kept', 'Kron']
    """
    found: dict[str, None] = {}
    for glob in (word.strip() for word in text.split(";")):
        matched = fnmatch.filter(CONTESTANTS, glob)
        if not matched:
            raise CommandError(f"nobody is called {glob!r}; put ; between names, which are {'; '.join(CONTESTANTS)}")
        found |= dict.fromkeys(matched)
    return list(found)


def hold_race(task: Task, folder: Path, **how: Any) -> Race:
    """Run a race, beside its records write what draw.py says of the task, and print what came of it."""
    ready = race(task, folder=folder, **how)
    folder.mkdir(parents=True, exist_ok=True)
    words = {name: getattr(ready.task, name) for name in DESCRIPTION}
    (folder / "task.json").write_text(json.dumps(words) + "\n", "utf-8")
    with show_progress(ready) as on_run:
        summary = ready.run(on_run).summary
    console().print(results_table(summary))
    console().print(summary["verdict"])
    return ready


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse(arguments)
    command = shlex.join(
        ["python", "-m", "benchmarks.training.run", *(sys.argv[1:] if arguments is None else arguments)]
    )
    try:
        names, tasks = choose_contestants(given.contestants), split_words(given.tasks, "--tasks")
        for name in tasks:  # all of them before the first one trains, which may take an hour
            check_task(name, given.data)
        for name in tasks:
            task = make_task(name, given.data, tiny=given.tiny)
            contestants, beyond = [enter(who, task) for who in names], given.beyond
            hold = partial(hold_race, task, device=given.device, folder=given.records / name, command=command)
            if given.search_steps is not None:
                short = hold(optimizers=contestants, steps=given.search_steps, seeds=1, beyond=beyond)
                contestants = [replace(each, rates=[short.sweeps[each.name].best]) for each in contestants]
                beyond = 0
            hold(optimizers=contestants, steps=given.steps, seeds=given.seeds, beyond=beyond)
    except CommandError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        aside().print(f"Stopped: finished runs are kept in {given.records}; the same command goes on from there.")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
