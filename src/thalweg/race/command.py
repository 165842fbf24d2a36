"""The race as a command: run it, print a table, draw the curves."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.race import digits
from thalweg.race.contestants import CONTESTANTS
from thalweg.race.run import best, run
from thalweg.show.extras import MissingExtra, extra


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m thalweg.race", description="Race optimizers on handwritten digits."
    )
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder for race.png (default: %(default)s)")
    parser.add_argument(
        "--epochs", type=positive, default=10, help="passes over the training set (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=positive, default=3, help="repetitions, with seeds 0, 1, ... (default: %(default)s)"
    )
    options = parser.parse_args(arguments)

    try:  # before the minute of racing, not after
        with extra("cli"):
            from rich.console import Console

        from thalweg.race.draw import draw
        from thalweg.race.terminal import progress_bars, results_table
    except MissingExtra as missing:
        sys.exit(str(missing))

    console, seeds = Console(), range(options.seeds)
    with progress_bars(console, CONTESTANTS, epochs=options.epochs, seeds=seeds) as on_epoch:
        records = run(CONTESTANTS, digits.load(), epochs=options.epochs, seeds=seeds, on_epoch=on_epoch)
    chosen = best(records)
    console.print(results_table(chosen))

    options.out.mkdir(parents=True, exist_ok=True)
    picture = options.out / "race.png"
    draw(chosen, CONTESTANTS, picture)
    console.print(f"Curves: {picture}")


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number
