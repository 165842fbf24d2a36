"""Tables and curves of recorded runs.

    python -m benchmarks.training.draw benchmarks/training/results --against "torch AdamW"

Writes results.md into the folder of the records, and a picture for each task if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.protocol import Result, results, steps_to

HEAD = "| optimizer | lr | {unit} | spread | validation | ms a step | seconds | to {against}'s end | state |"


def table(record: Mapping[str, Any], against: str) -> str:
    """The contestants of a task, best first."""
    found = results(record)
    base = next((result for result in found if result.contestant == against), None)
    unit = "test, %" if record["higher_is_better"] else "test loss"
    rows = [HEAD.format(unit=unit, against=against), "|---" * 9 + "|"]
    rows += [row(result, record, base) for result in found]
    about = (
        f"{record['about']}; {record['parameters']:,} parameters, {record['steps']} steps of {record['batch_size']}; "
        f"{record['device']}, torch {record['torch']}, data {record['data']}."
    )
    return f"## {record['task']}\n\n{about[0].upper()}{about[1:]}\n\n" + "\n".join(rows) + "\n"


def row(result: Result, record: Mapping[str, Any], base: Result | None) -> str:
    digits = 2 if record["higher_is_better"] else 3
    seconds, reached = result.ms * record["steps"] / 1000, ""
    if base is not None:
        steps = steps_to(result.curve, base.curve[-1][1], record["higher_is_better"])
        reached = "never" if steps is None else f"{steps:.0f} steps, {steps * result.ms / 1000:.1f} s"
    cells = (
        result.contestant,
        f"{result.lr:g}" + (" (edge)" if result.at_edge else ""),
        f"{result.test:.{digits}f}",
        f"± {result.spread:.{digits}f} of {result.seeds}" if result.seeds > 1 else "one seed",
        f"{result.validation:.{digits}f}",
        f"{result.ms:.2f}",
        f"{seconds:.1f}",
        reached,
        f"{result.state_bytes / record['parameters']:.2f} bytes",
    )
    return "| " + " | ".join(cells) + " |"


def picture(record: Mapping[str, Any], path: Path, most: int = 8) -> None:
    """Validation on the way, by steps and by seconds, of the best contestants."""
    from matplotlib import pyplot

    figure, (by_steps, by_seconds) = pyplot.subplots(1, 2, figsize=(11, 4.5), sharey=True, layout="constrained")
    ends = []
    for result in results(record)[:most]:
        steps, scores = zip(*result.curve, strict=True)
        by_steps.plot(steps, scores, label=result.contestant)
        by_seconds.plot([step * result.ms / 1000 for step in steps], scores)
        ends += scores[len(scores) // 4 :]
    room = (max(ends) - min(ends)) / 20
    by_steps.set(xlabel="step", ylabel=f"validation: {record['about']}", ylim=(min(ends) - room, max(ends) + room))
    by_seconds.set(xlabel="seconds")
    by_steps.legend(fontsize=8)
    figure.suptitle(record["task"])
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("records", type=Path, help="folder of records")
    parser.add_argument(
        "--against", default="torch AdamW", help="whose final score others reach (default: %(default)s)"
    )
    parser.add_argument("--pictures", action="store_true", help="draw curves too, which needs matplotlib")
    given = parser.parse_args(arguments)
    found = [json.loads(path.read_text()) for path in sorted(given.records.glob("*.json"))]
    (given.records / "results.md").write_text("\n".join(table(record, given.against) for record in found))
    for record in found if given.pictures else []:
        picture(record, given.records / f"{record['task']}.svg")


if __name__ == "__main__":
    main()
