"""The time of one optimizer step on the CPU, on the parameter shapes of real models: ours and the published ones.

    python benchmarks/step_cpu.py --models gpt2 --rules lamb,lars --json report/step_cpu.json

Parameters and gradients are float32 and in memory already. Everyone has all cores. The contestants of a rule take turns
in one process, and in each round everyone steps once. Rounds that other processes disturb are run again (quiet.py), but
an idle machine is better. Before each step an array much larger than the caches is overwritten, which measures the
bandwidth of the memory at that moment (bandwidth.py) and leaves nothing of the contestant before in the caches. Then
there is a short rest, until threads have gone to sleep; what happens when they have not is measured by ``--loop``.
Where memory does not suffice for all at once, there are several heats, with the reference, the first of ours, in each.

The columns:

ratio               median over the rounds of its time divided by the time of the reference in the same round
GB/s at the floor   bytes that the rule must move at least, divided by the median time
bytes a parameter   what could have been moved in the median time, at the bandwidth measured
share of the floor  time of a step at the floor, at the bandwidth measured, divided by the median time. Tensors that fit
                    into the caches can be read twice at the price of once: it can exceed 100%
extra memory        peak during a step beyond what there was before it (``--memory``)
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    models, rules = "gpt2,resnet50,bert_large", "lamb,lars,adafactor,adamw,sgd"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=names, default=["gpt2"], help=f"some of {models} (default: gpt2)")
    parser.add_argument("--rules", type=names, default=names(rules), help=f"default: {rules}")
    parser.add_argument(
        "--repeats", type=int, default=7, help="rounds that count, after two more (default: %(default)s)"
    )
    parser.add_argument("--engine", default="auto", help="of our optimizers (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="cores for everyone (default: all there are)")
    parser.add_argument("--budget", type=float, default=14.0, help="GiB of memory to stay below (default: %(default)s)")
    parser.add_argument("--memory", action="store_true", help="also the peaks of memory, in processes of their own")
    parser.add_argument("--loop", type=int, nargs="?", const=30, help="also train, for so many turns (30)")
    parser.add_argument("--json", type=Path, help="write everything, all samples included, to this file")
    given = parser.parse_args(arguments)
    for kind, known in (("models", models), ("rules", rules)):
        for name in getattr(given, kind):
            if name not in names(known):
                parser.error(f"--{kind}: there is no {name!r}, only {known}")
    if given.repeats < 1:
        parser.error("--repeats must be at least 1")
    return given


def keep_to_cores(count: int | None) -> None:
    """Leave everyone as many cores. Libraries count them when they are loaded, so this comes first."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if count is not None:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    keep_to_cores(given.threads)
    from bandwidth import Bandwidth
    from contestants import Model
    from loop import train
    from report import comparison_table, heading, loop_table, surroundings
    from rounds import compare

    record = surroundings()
    say(heading(record))
    record["results"] = []
    bandwidth = Bandwidth()
    chosen = dict(engine=given.engine, repeats=given.repeats, budget=given.budget, memory=given.memory)
    for name in given.models:
        model = Model(name)
        for rule in given.rules:
            found = compare(model, rule, bandwidth, **chosen)
            say(comparison_table(found, given.memory))
            result = dict(model=name, parameters=model.elements, rule=rule, reference=found.reference)
            result |= dict(rows=list(found.rows()), skipped=found.skipped, heats=[asdict(heat) for heat in found.heats])
            record["results"].append(result)
    del bandwidth
    if given.loop:
        record["loop"] = train(given.loop, given.engine)
        say(loop_table(record["loop"]))
    record["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    say(f"\nMost memory that this process had: {record['peak_gib']:.1f} GiB.")
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
