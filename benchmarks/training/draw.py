"""Tables and curves of the recorded runs.

    python -m benchmarks.training.draw

Writes results.md beside the records, and a picture of every task into docs/images if matplotlib is installed. Runs
nothing: the same records give the same files.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.protocol import TASKS, Result, half_range, read, results, score_at, steps_to
from thalweg.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "torch AdamW"
NOT_RUN = "not run yet"
#: So many contestants have a curve: those that are best, and the baseline.
CURVES = 7
HEAD = (
    "| optimizer | lr | rates tried | test | validation when {0}'s time is over | to {0}'s end | ms a step | state |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Field:
    """The results of one task, and what they are measured against."""

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.record = record
        self.results = results(record)
        self.higher: bool = record["higher_is_better"]
        self.digits = 2 if self.higher else 3
        self.base = next((result for result in self.results if result.contestant == BASELINE), None)

    @property
    def entered(self) -> list[str]:
        return list(dict.fromkeys(run["contestant"] for run in self.record["runs"]))

    def of(self, contestant: str) -> Result | None:
        return next((result for result in self.results if result.contestant == contestant), None)

    def with_spread(self, values: Sequence[float]) -> str:
        if len(values) == 1:
            return f"{values[0]:.{self.digits}f} (one seed)"
        return f"{statistics.mean(values):.{self.digits}f} ± {half_range(values):.{self.digits}f}"

    def rate(self, result: Result) -> str:
        return f"{result.lr:g}" + (" (edge)" if result.at_edge else "")

    def test(self, result: Result) -> str:
        """On test data, after as many steps as all others."""
        if result.seeds == 1:
            return f"{result.test:.{self.digits}f} (one seed)"
        diverged = f", {result.diverged} of {result.seeds} diverged" if result.diverged else ""
        return f"{result.test:.{self.digits}f} ± {result.spread:.{self.digits}f}{diverged}"

    def at_equal_seconds(self, result: Result) -> str:
        """On validation data, when the baseline's time is over; others may be in the middle of their schedule."""
        if self.base is None:
            return f"no {BASELINE}"
        if self.base.ms is None or result.ms is None:
            return "no time"
        step = min(self.record["steps"] * self.base.ms / result.ms, self.record["steps"])
        scores = [score_at(curve, step) for curve in result.curves]
        known = [score for score in scores if score is not None]
        return self.with_spread(known) if len(known) == len(scores) else "not scored by then"

    def to_the_baseline(self, result: Result) -> str:
        """Steps, and seconds, until the baseline's final validation is reached."""
        if self.base is None or result is self.base:
            return ""
        found = [steps_to(curve, self.base.validation, self.higher) for curve in result.curves]
        reached = [steps for steps in found if steps is not None]
        if not reached:
            return "never"
        spread = f" ± {half_range(reached):.0f}" if len(reached) > 1 else ""
        seconds = "" if result.ms is None else f", {statistics.mean(reached) * result.ms / 1000:.1f} s"
        some = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)} seeds)"
        return f"{statistics.mean(reached):.0f}{spread} steps{seconds}{some}"

    def row(self, result: Result) -> str:
        cells = (
            result.contestant,
            self.rate(result),
            str(result.trials),
            self.test(result),
            self.at_equal_seconds(result),
            self.to_the_baseline(result),
            "" if result.ms is None else f"{result.ms:.2f}",
            f"{result.state_bytes / self.record['parameters']:.2f} bytes",
        )
        return line(cells)


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def section(field: Field, contestants: Collection[str]) -> str:
    """The contestants of a task, best first, and who is missing."""
    record = field.record
    about = (
        f"{record['about']}; {record['parameters']:,} parameters, {record['steps']} steps of {record['batch_size']}; "
        f"{record['device']}, torch {record['torch']}, data {record['data']}."
    )
    lines = [f"## {record['task']}", "", about[0].upper() + about[1:], "", HEAD.format(BASELINE)]
    lines += map(field.row, field.results)
    by_one = [result.contestant for result in field.results if result.trials > 1 and result.chosen_by == 1]
    missing = [name for name in contestants if name not in field.entered]
    diverged = [name for name in field.entered if field.of(name) is None]
    for told, who in (
        ("Rate chosen by seed 0 alone", by_one),
        ("Diverged at every rate", diverged),
        (NOT_RUN.capitalize(), missing),
    ):
        lines += ["", f"{told}: {'; '.join(who)}."] if who else []
    return "\n".join(lines) + "\n"


def summary(fields: Mapping[str, Field], contestants: Collection[str]) -> str:
    """The same measure on all tasks, side by side, for each measure."""
    entered = [name for name in contestants if any(name in field.entered for field in fields.values())]
    parts = []
    for title, measure in (
        ("At equal steps: test", Field.test),
        (f"At equal seconds: validation when {BASELINE}'s time is over", Field.at_equal_seconds),
        (f"To {BASELINE}'s final validation", Field.to_the_baseline),
        ("Learning rates", Field.rate),
    ):
        rows = [line([name, *(cell(field, name, measure) for field in fields.values())]) for name in entered]
        head = [f"## {title}", "", line(["", *fields]), "|---" * (len(fields) + 1) + "|"]
        parts.append("\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def cell(field: Field, name: str, measure: Callable[[Field, Result], str]) -> str:
    result = field.of(name)
    if result is None:
        return "diverged" if name in field.entered else NOT_RUN
    return measure(field, result)


def report(records: Sequence[Mapping[str, Any]], contestants: Collection[str]) -> str:
    found = {record["task"]: Field(record) for record in records}
    fields = {task: found[task] for task in (*TASKS, *found) if task in found}
    text = """# Recorded training runs

Made from the records beside this file by `python -m benchmarks.training.draw`; [how they are run](../README.md). A
loss (text) is the better the less, a percentage (fashion, vit) the more. ±: half of the difference between the best
and the worst seed. (edge): the chosen rate is the least or the largest that was tried. No time: the device was shared
in every run, so that times do not count. Seconds are those of training steps, without compilation and scoring.
"""
    return "\n".join([text, summary(fields, contestants), *(section(field, contestants) for field in fields.values())])


def picture(field: Field, folder: Path) -> None:
    """Validation on the way, by steps and by seconds: the mean of the seeds in a band of all of them.

    Those with one seed are drawn where nobody has more.
    """
    from thalweg.show.pictures import entitle, figure, quieten, save

    record = field.record
    drawn = [result for result in field.results if result.seeds > 1] or field.results
    if not drawn:  # everyone diverged
        return
    best = [result for result in drawn if result.contestant != BASELINE][: CURVES - 1]
    made = figure(11, 4.6)
    by_steps, by_seconds = made.subplots(1, 2, sharey=True)
    late: list[float] = []
    for result in (result for result in drawn if result in best or result.contestant == BASELINE):
        moments = list(zip(*result.curves, strict=False))
        steps = [moment[0][0] for moment in moments]
        scores = [[score for _, score in moment] for moment in moments]
        mean, least, most = ([of(seen) for seen in scores] for of in (statistics.mean, min, max))
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if result.contestant == BASELINE else {}
        (drawn_line,) = by_steps.plot(steps, mean, label=f"{result.contestant}, lr {result.lr:g}", **style)
        look: dict[str, Any] = {"color": drawn_line.get_color()}
        by_steps.fill_between(steps, least, most, alpha=0.12, **look)
        if result.ms is not None:
            seconds = [step * result.ms / 1000 for step in steps]
            by_seconds.plot(seconds, mean, **look, linewidth=drawn_line.get_linewidth())
            by_seconds.fill_between(seconds, least, most, alpha=0.12, **look)
        late += mean[len(mean) // 4 :]
    room = (max(late) - min(late)) / 15
    for axes, name in ((by_steps, "step"), (by_seconds, "seconds")):
        quieten(axes)
        axes.set(xlabel=name, ylim=(min(late) - room, max(late) + room))
    by_steps.set_ylabel("validation, %" if field.higher else "validation loss")
    by_steps.legend(fontsize=8, frameon=False)
    entitle(by_steps, record["task"], f"{record['about']}; {record['device']}")
    save(made, folder, f"training-{record['task']}", ["svg"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/training/results", help="folder of records")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/images", help="folder of the pictures")
    given = parser.parse_args(arguments)
    from benchmarks.training.contestants import CONTESTANTS

    try:
        found = [read(path) for path in sorted(given.records.glob("*.json"))]
    except CommandError as error:
        raise SystemExit(str(error)) from None
    if not found:
        raise SystemExit(
            f"{given.records} holds no records: run python -m benchmarks.training.run --records, or name another"
        )
    (given.records / "results.md").write_text(report(found, CONTESTANTS))
    if importlib.util.find_spec("matplotlib") is not None:
        for record in found:
            picture(Field(record), given.pictures)


if __name__ == "__main__":
    main()
