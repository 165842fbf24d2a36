"""Tables and curves of the recorded runs.

    python -m benchmarks.training.draw

Writes results.md beside the records, and a picture of every task into docs/images if matplotlib is installed. Runs
nothing: the same records give the same files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.tasks import TASKS
from thalweg.race.contest import RECORDS
from thalweg.race.run import Record, read_records
from thalweg.race.summary import list_results

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "torch AdamW"
NOT_RUN = "not run yet"
#: So many contestants have a curve: those that are best, and the baseline.
CURVES = 7
HEAD = (
    "| optimizer | lr | rates tried | test | validation when {0}'s time is over | to {0}'s end | ms a step | state |\n"
    "|---|---|---|---|---|---|---|---|"
)
Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class Result:
    """A contestant at the rate that the race chooses, seed by seed."""

    contestant: str
    lr: float
    #: Every rate that was tried, in order.
    rates: Sequence[float]
    #: Whether seed 0 alone chose the rate: no other one ran with other seeds.
    chosen_once: bool
    #: How many seeds ran at the chosen rate; how many diverged.
    seeds: int
    diverged: int
    #: Of the seeds that did not diverge: by step the loss on validation, and at the end the score on test data.
    curves: Sequence[Curve]
    tests: Sequence[float]
    #: A step's milliseconds while nothing else used the device; None: never measured so.
    ms: float | None
    #: Bytes of state for each parameter.
    state: float

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond the chosen one might have been better."""
        return self.lr in (self.rates[0], self.rates[-1])


class Field:
    """The results of one task, best first, and what they are measured against."""

    def __init__(self, task: Mapping[str, Any], records: Sequence[Record]) -> None:
        self.task, self.where = task, records[-1].where
        latest = {record.run.contestant: record.run.optimizer for record in records}  # the last settings of a name
        records = [record for record in records if record.run.optimizer == latest[record.run.contestant]]
        #: By contestant the rates that were tried, also in shorter runs.
        self.rates = {name: sorted({one.run.lr for one in records if one.run.contestant == name}) for name in latest}
        wanted = task["steps"], task["batch_size"]
        self.records = [record for record in records if (record.run.steps, record.run.batch_size) == wanted]
        self.entered = list(dict.fromkeys(record.run.contestant for record in self.records))
        self.is_share = task["best_score"] == "most"
        self.digits = 2 if self.is_share else 3
        found = [self.read_result(result) for result in list_results(self.records, None)]
        sign = -1 if self.is_share else 1
        self.results = sorted(
            (result for result in found if result.curves), key=lambda result: sign * statistics.mean(result.tests)
        )
        self.base = self.find(BASELINE)

    def read_result(self, summary: Mapping[str, Any]) -> Result:
        own = [record for record in self.records if record.run.contestant == summary["contestant"]]
        chosen = [record for record in own if record.run.lr == summary["lr"]]
        ended = [record.result for record in chosen if record.result.loss[-1] is not None]
        others = [record for record in own if record.run.lr != summary["lr"] and record.run.seed]
        alone = [record.result for record in own if not record.where.get("shared")]
        ms = [1000 * result.seconds[-1] / result.step[-1] for result in alone]
        rates = self.rates[summary["contestant"]]
        return Result(
            contestant=summary["contestant"],
            lr=summary["lr"],
            rates=rates,
            chosen_once=len(rates) > 1 and not others,
            seeds=len(chosen),
            diverged=len(chosen) - len(ended),
            curves=[read_curve(record) for record in chosen if record.result.loss[-1] is not None],
            tests=[self.read_score(result.score[-1]) for result in ended if result.score],
            ms=statistics.median(ms) if ms else None,
            state=own[0].result.state_bytes / own[0].result.parameters,
        )

    def find(self, contestant: str) -> Result | None:
        return next((result for result in self.results if result.contestant == contestant), None)

    def read_score(self, score: float | None) -> float:
        """A score as tables have it: shares in percent."""
        return round(100 * (score or 0.0), 4) if self.is_share else (score or 0.0)

    def read_loss(self, loss: float) -> float:
        """A loss on validation data as tables have it: the percentage that is right, where the loss is what is not."""
        return round(100 - 100 * loss, 4) if self.is_share else loss

    def write_spread(self, values: Sequence[float], more: str = "", seeds: int | None = None) -> str:
        mean = f"{statistics.mean(values):.{self.digits}f}"
        if (len(values) if seeds is None else seeds) == 1:
            return f"{mean} (one seed)"
        return f"{mean} ± {half_range(values):.{self.digits}f}{more}"

    def write_rate(self, result: Result) -> str:
        return f"{result.lr:g}" + (" (edge)" if result.at_edge else "")

    def write_test(self, result: Result) -> str:
        """On test data, after as many steps as all others."""
        diverged = f", {result.diverged} of {result.seeds} diverged" if result.diverged else ""
        return self.write_spread(result.tests, diverged, result.seeds)

    def write_at_equal_seconds(self, result: Result) -> str:
        """On validation data, when the baseline's time is over; others may be in the middle of their schedule."""
        if self.base is None:
            return f"no {BASELINE}"
        if self.base.ms is None or result.ms is None:
            return "no time"
        step = min(self.task["steps"] * self.base.ms / result.ms, self.task["steps"])
        losses = [loss_at(curve, step) for curve in result.curves]
        known = [self.read_loss(loss) for loss in losses if loss is not None]
        return self.write_spread(known) if len(known) == len(losses) else "not scored by then"

    def write_way_to_the_baseline(self, result: Result) -> str:
        """Steps, and seconds, until the baseline's final validation is reached."""
        if self.base is None or result is self.base:
            return ""
        goal = round(statistics.mean(curve[-1][1] for curve in self.base.curves), 9)  # a loss that is equal is enough
        found = [steps_to(curve, goal) for curve in result.curves]
        reached = [steps for steps in found if steps is not None]
        if not reached:
            return "never"
        spread = f" ± {half_range(reached):.0f}" if len(reached) > 1 else ""
        seconds = "" if result.ms is None else f", {statistics.mean(reached) * result.ms / 1000:.1f} s"
        some = "" if len(reached) == len(found) else f" ({len(reached)} of {len(found)} seeds)"
        return f"{statistics.mean(reached):.0f}{spread} steps{seconds}{some}"

    def write_row(self, result: Result) -> str:
        return write_line(
            [
                result.contestant,
                self.write_rate(result),
                str(len(result.rates)),
                self.write_test(result),
                self.write_at_equal_seconds(result),
                self.write_way_to_the_baseline(result),
                "" if result.ms is None else f"{result.ms:.2f}",
                f"{result.state:.2f} bytes",
            ]
        )


def read_curve(record: Record) -> list[tuple[int, float]]:
    """The loss by step, up to where it diverged."""
    points = zip(record.result.step, record.result.loss, strict=True)
    return [(step, loss) for step, loss in points if loss is not None]


def half_range(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / 2


def steps_to(curve: Curve, wanted: float) -> float | None:
    """The step at which a curve reaches a loss, between two of its points; None if it never does."""
    before: tuple[int, float] | None = None
    for step, loss in curve:
        if loss <= wanted:
            if before is None or before[1] == loss:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - wanted) / (before[1] - loss)
        before = (step, loss)
    return None


def loss_at(curve: Curve, step: float) -> float | None:
    """The loss at a step, between two points of a curve; None before the first, and that of the end after it."""
    steps, losses = zip(*curve, strict=True)
    return None if step < steps[0] else float(np.interp(step, steps, losses))


def write_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_section(field: Field, contestants: Collection[str]) -> str:
    """The contestants of a task, best first, and who is missing."""
    task, first = field.task, field.records[0]
    device = field.where["machine"].get("gpu", "cpu")
    about = (
        f"{task['about']}; {first.result.parameters:,} parameters, {task['steps']} steps of {task['batch_size']}; "
        f"{device}, torch {field.where['versions']['torch']}, data {first.run.fingerprint[:12]}."
    )
    lines = [f"## {task['title']}", "", about[0].upper() + about[1:], "", HEAD.format(BASELINE)]
    lines += map(field.write_row, field.results)
    for remark, who in (
        ("Rate chosen by seed 0 alone", [result.contestant for result in field.results if result.chosen_once]),
        ("Diverged at every rate", [name for name in field.entered if field.find(name) is None]),
        (NOT_RUN.capitalize(), [name for name in contestants if name not in field.entered]),
    ):
        lines += ["", f"{remark}: {'; '.join(who)}."] if who else []
    return "\n".join(lines) + "\n"


def write_summary(fields: Mapping[str, Field], contestants: Collection[str]) -> str:
    """The same measure on all tasks, side by side, for each measure."""
    entered = [name for name in contestants if any(name in field.entered for field in fields.values())]
    parts = []
    for title, measure in (
        ("At equal steps: test", Field.write_test),
        (f"At equal seconds: validation when {BASELINE}'s time is over", Field.write_at_equal_seconds),
        (f"To {BASELINE}'s final validation", Field.write_way_to_the_baseline),
        ("Learning rates", Field.write_rate),
    ):
        rows = [
            write_line([name, *(write_cell(field, name, measure) for field in fields.values())]) for name in entered
        ]
        head = [f"## {title}", "", write_line(["", *fields]), "|---" * (len(fields) + 1) + "|"]
        parts.append("\n".join([*head, *rows]) + "\n")
    return "\n".join(parts)


def write_cell(field: Field, name: str, measure: Callable[[Field, Result], str]) -> str:
    result = field.find(name)
    if result is None:
        return "diverged" if name in field.entered else NOT_RUN
    return measure(field, result)


def write_report(found: Mapping[str, Field], contestants: Collection[str]) -> str:
    fields = {task: found[task] for task in (*TASKS, *found) if task in found}
    text = """# Recorded training runs

Made from the records beside this file by `python -m benchmarks.training.draw`; [how they are run](../README.md). A
loss (text) is the better the less, a percentage (fashion, vit) the more. ±: half of the difference between the best
and the worst seed. (edge): the chosen rate is the least or the largest that was tried. No time: the device was shared
in every run, so that times do not count. Seconds are those of training steps, without compilation and scoring.
"""
    sections = [write_section(field, contestants) for field in fields.values()]
    return "\n".join([text, write_summary(fields, contestants), *sections])


def draw_picture(field: Field, folder: Path) -> None:
    """Validation on the way, by steps and by seconds: the mean of the seeds in a band of all of them.

    Those with one seed are drawn where nobody has more.
    """
    import matplotlib
    from matplotlib.figure import Figure

    drawn = [result for result in field.results if result.seeds > 1] or field.results
    if not drawn:  # everyone diverged
        return
    best = [result for result in drawn if result.contestant != BASELINE][: CURVES - 1]
    picture = Figure(figsize=(11, 4.6), layout="constrained")
    by_steps, by_seconds = picture.subplots(1, 2, sharey=True)
    late: list[float] = []
    for result in (result for result in drawn if result in best or result.contestant == BASELINE):
        moments = list(zip(*result.curves, strict=False))
        steps = [moment[0][0] for moment in moments]
        scores = [[field.read_loss(loss) for _, loss in moment] for moment in moments]
        mean, least, most = ([of(seen) for seen in scores] for of in (statistics.mean, min, max))
        style: dict[str, Any] = {"color": "black", "linewidth": 2.5} if result.contestant == BASELINE else {}
        (line,) = by_steps.plot(steps, mean, label=f"{result.contestant}, lr {result.lr:g}", **style)
        look: dict[str, Any] = {"color": line.get_color()}
        by_steps.fill_between(steps, least, most, alpha=0.12, **look)
        if result.ms is not None:
            seconds = [step * result.ms / 1000 for step in steps]
            by_seconds.plot(seconds, mean, **look, linewidth=line.get_linewidth())
            by_seconds.fill_between(seconds, least, most, alpha=0.12, **look)
        late += mean[len(mean) // 4 :]
    room = (max(late) - min(late)) / 15
    for axes, name in ((by_steps, "step"), (by_seconds, "seconds")):
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.grid(color="#e4e4e4")
        axes.set(xlabel=name, ylim=(min(late) - room, max(late) + room))
    by_steps.set_ylabel("validation, %" if field.is_share else "validation loss")
    by_steps.legend(fontsize=8, frameon=False)
    about = f"{field.task['about']}; {field.where['machine'].get('gpu', 'cpu')}"
    by_steps.set_title(f"{field.task['title']}\n{about}", loc="left", fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "thalweg", "svg.fonttype": "none"}):
        picture.savefig(folder / f"training-{field.task['title']}.svg", metadata={"Date": None})


def load_fields(folder: Path) -> dict[str, Field]:
    """By task, all that its folder holds: every race there has added to it."""
    found = {}
    for path in sorted(folder.glob("*/task.json")):
        task = json.loads(path.read_text("utf-8"))
        if records := list(read_records(path.with_name(RECORDS))[0].values()):
            found[task["title"]] = Field(task, records)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--records", type=Path, default=ROOT / "benchmarks/training/results", help="folder of records")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of all tasks (default: the one in the docs)")
    given = parser.parse_args(arguments)
    from benchmarks.training.contestants import CONTESTANTS

    found = load_fields(given.records)
    if not found:
        raise SystemExit(
            f"{given.records} holds no records: run python -m benchmarks.training.run --records, or name another"
        )
    (given.records / "results.md").write_text(write_report(found, CONTESTANTS))
    if importlib.util.find_spec("matplotlib") is not None:
        for name, field in found.items():
            if given.pictures is not None or name == "text":
                draw_picture(field, given.pictures or ROOT / "docs/images")


if __name__ == "__main__":
    main()
