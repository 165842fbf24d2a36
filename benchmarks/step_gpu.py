"""The time of one optimizer step on a GPU, beside every peer that is installed.

    python benchmarks/step_gpu.py --out report/step_gpu

A thin call of ``thalweg bench --device cuda``, which says what the columns mean (docs/bench.md): all models of
benchmarks/results/step_gpu.md by default, one table for each rule and model, then everything as JSON and a picture.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.bench import bench, markdown, process
from thalweg.errors import CommandError

MODELS, RULES = "gpt2,bert-large,resnet50,llama-1b", "lamb,lars,adafactor"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n\n")
    sys.stdout.flush()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=names(MODELS), help=f"default: {MODELS}")
    parser.add_argument("--rules", type=names, default=names(RULES), help=f"default: {RULES}; kron takes longest")
    parser.add_argument("--dtype", default="float32", help="of parameters and gradients (default: %(default)s)")
    parser.add_argument("--against", type=names, help="packages to compare with (default: all that are installed)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="folder for bench.json, bench.md and the picture")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    process.prepare("cuda", None)
    try:
        found = bench(
            given.models,
            rules=given.rules,
            device="cuda",
            dtype=given.dtype,
            against=given.against,
            repeats=given.repeats,
            on_comparison=lambda comparison: say(markdown.table(comparison)),
        )
    except CommandError as error:
        sys.exit(f"step_gpu.py: {error}")
    found.command = shlex.join(
        ["python", "benchmarks/step_gpu.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    say(markdown.heading(found))
    if given.out is not None:
        from thalweg.bench import files  # which draws, with matplotlib

        files.write(found, given.out)


if __name__ == "__main__":
    main()
