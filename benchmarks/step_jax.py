"""The time of one optimizer step in JAX: ours and optax's, called one by one and many at a time.

    python benchmarks/step_jax.py --models gpt2,resnet50 --json report/step_jax.json

A step is ``update`` and ``optax.apply_updates`` in one compiled program, float32, parameters and state donated. The two
take turns in one process, on a GPU if JAX sees one. Two times are taken, by ``thalweg.bench``, since a model of
hundreds of tensors can cost more to hand over than to compute:

call   a program of one step, as a training loop would call an optimizer of its own
loop   a program of twenty steps, so that the device alone counts, as in a training step compiled as a whole

ratio              median over the rounds of optax's time divided by ours: above 1 we are faster
share of the floor time of moving the bytes that the rule must move at least, at the bandwidth measured, by "loop"
temporary          memory that the program of one step needs beside its arguments and results
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from thalweg.bench import Bench, Comparison, bench, report
from thalweg.errors import CommandError
from thalweg.show.devices import prepare_process

STEPS = 20


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def make_line(rule: str, call: Comparison, loop: Comparison) -> str:
    """A row of the table."""
    cells = [rule, call.model]
    for comparison in (call, loop):
        rows = comparison.rows
        cells += [report.milliseconds(row.median) for row in rows] + [""] * (2 - len(rows))
        cells.append(f"{rows[1].ratio:.2f}" if len(rows) > 1 else "")
    share = loop.rows[0].share_of_floor
    cells.append("" if share is None else f"{share:.0%}")
    for field, unit in (("trace_s", 1.0), ("compile_s", 1.0), ("temporary_bytes", 1e6)):
        cells.append(" / ".join(f"{row.compiled[field] / unit:.1f}" for row in call.rows))
    return f"| {' | '.join(cells)} |"


def make_heading(found: Bench, arguments: Sequence[str]) -> str:
    return (
        f"# One optimizer step in JAX\n\n{report.describe_surroundings(found)}\n\n"
        f"    {shlex.join(['python', 'benchmarks/step_jax.py', *arguments])}\n\n"
        "| rule | model | call: ours, ms | optax, ms | ratio | loop: ours, ms | optax, ms | ratio | share of the floor "
        "| trace, s | compile, s | temporary, MB |\n" + "|---|---|" + "---:|" * 10
    )


def main(arguments: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=["gpt2", "resnet50"], help="default: gpt2,resnet50")
    parser.add_argument("--rules", type=names, default=["lamb", "lars", "adafactor"], help="and kron, adamw, sgd")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: what JAX finds")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default: %(default)s)")
    parser.add_argument("--small", type=int, help="largest parameters that are stacked with others of their shape")
    parser.add_argument("--json", type=Path, help="write everything, all samples included, to this file")
    given = parser.parse_args(arguments)
    prepare_process(given.device or "")
    import jax

    if given.small is not None:
        from thalweg.optax import batches

        batches.SMALL = given.small
    device = given.device or ("cuda" if jax.default_backend() == "gpu" else "cpu")
    runs: dict[str, list[Bench]] = {"call": [], "loop": []}
    for rule in given.rules:
        try:
            for kind, inner in (("call", 1), ("loop", STEPS)):
                found = bench(
                    given.models,
                    optimizers=[rule],
                    device=device,
                    front_ends=["optax"],
                    against=["optax"],
                    repeats=given.repeats,
                    inner=inner,
                    memory=False,
                )
                runs[kind].append(found)
        except CommandError as error:
            sys.exit(f"step_jax.py: {error}")
        call, loop = (found[-1] for found in runs.values())
        if len(runs["call"]) == 1:
            say(make_heading(call, arguments))
        for pair in zip(call.comparisons, loop.comparisons, strict=True):
            say(make_line(rule, *pair))
    if any(found.disturbed for kind in runs.values() for found in kind):
        say(f"\n**{report.NOT_TO_BE_QUOTED}**")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        record = {kind: [found.plain() for found in of_kind] for kind, of_kind in runs.items()}
        given.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
