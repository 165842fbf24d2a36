"""The table of results: its columns, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.race.summary import Summary, in_percent
from thalweg.show.units import human_bytes, human_seconds, percent, short_number


@dataclass(frozen=True)
class Column:
    title: str
    #: The key of a result that stands there, and how its value is written.
    key: str
    write: Callable[[Any], str]
    #: Which values are the best: the "least" or the "most"; "": none is.
    best: str = ""

    def is_best(self, result: Summary, results: Sequence[Summary]) -> bool:
        """Whether it is the best of its column, alone or with others: not where all are equal, nor if it diverged."""
        values = [other[self.key] for other in results if other["loss"] is not None and other[self.key] is not None]
        if not self.best or result["loss"] is None or len(set(values)) < 2:
            return False
        return bool(result[self.key] == (min if self.best == "least" else max)(values))

    def spread(self, result: Summary) -> str:
        """The range over seeds, if there is one."""
        low, high = result.get(f"{self.key}_low"), result.get(f"{self.key}_high")
        if low is None or (low == high and result[self.key] is not None):
            return ""
        return "in some seeds" if result[self.key] is None else f"{self.write(low)} to {self.write(high)}"


def columns_of(summary: Summary) -> list[Column]:
    """Those that a race has something for."""
    target, goal = summary["target"], "" if summary["target"] is None else f" to {summary['target']:g}"
    score = percent if in_percent(summary) else short_number
    columns = [Column("lr", "lr", short_number), Column(summary["loss_name"], "loss", short_number, "least")]
    columns += [Column(summary["score_name"], "score", score, summary["best_score"])] if summary["score_name"] else []
    if target is not None:
        columns.append(Column(f"steps{goal}", "steps_to_target", short_number, "least"))
        columns.append(Column(f"seconds{goal}", "seconds_to_target", human_seconds, "least"))
    return [
        *columns,
        Column("seconds", "seconds", human_seconds, "least"),
        Column("state", "state_bytes", human_bytes, "least"),
    ]


def write_cell(column: Column, result: Summary) -> str:
    value = result[column.key]
    return column.write(value) if value is not None else "diverged" if column.key == "loss" else "–"


def describe_conditions(summary: Summary) -> str:
    """What is the same for everyone, and how the search went."""
    return (
        f"Each at its best learning rate, by final loss. {summary['search']} Weights do not decay and momentum is "
        "0.9 where a default is 0, unless an option says otherwise. Seconds: training alone, one run at a time."
    )
