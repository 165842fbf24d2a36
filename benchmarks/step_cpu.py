"""The time of one optimizer step on the CPU, beside every peer that is installed, and a training loop.

    python benchmarks/step_cpu.py --models gpt2 --rules lamb,lars --json report/step_cpu.json

``thalweg bench`` measures the same, with tables and pictures; how, and what the columns mean, is in docs/bench.md.
Here five rules are the default, results are Markdown as in benchmarks/results, and ``--loop`` trains a network too.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.bench import bench, markdown, process
from thalweg.errors import CommandError


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    rules = "lamb,lars,adafactor,adamw,sgd"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=["gpt2"], help="such as gpt2,resnet50 (default: gpt2)")
    parser.add_argument("--rules", type=names, default=names(rules), help=f"default: {rules}")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--engine", default="auto", help="of our optimizers (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="cores for everyone (default: all there are)")
    parser.add_argument("--budget", type=float, default=14.0, help="GiB of memory to stay below (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="also the peaks of memory, in processes of their own")
    parser.add_argument("--loop", type=int, nargs="?", const=30, help="also train, for so many turns (30)")
    parser.add_argument("--json", type=Path, help="write everything, all samples included, to this file")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    process.prepare("cpu", given.threads)
    try:
        found = bench(
            given.models,
            rules=given.rules,
            engine=given.engine,
            repeats=given.repeats,
            budget=given.budget * 2**30,
            memory=given.memory,
            on_comparison=lambda comparison: say(markdown.table(comparison)),
        )
    except CommandError as error:
        sys.exit(f"step_cpu.py: {error}")
    found.command = shlex.join(
        ["python", "benchmarks/step_cpu.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    record = found.plain()
    if given.loop:
        from loop import loop_table, train

        record["loop"] = train(given.loop, given.engine)
        say(loop_table(record["loop"]))
    say(markdown.heading(found))
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
