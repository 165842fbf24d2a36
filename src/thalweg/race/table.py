"""The table of results: its columns, for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thalweg.race.summary import Summary, in_percent
from thalweg.show.units import human_bytes, human_seconds, percent, short_number


@dataclass(frozen=True)
class Column:
    #: In the report, and in the terminal; "": it is not there.
    title: str
    short: str
    #: What of a result stands there: one of its keys, or what follows from it.
    key: str | Callable[[Summary], Any]
    #: How a value is written in the report, and in the terminal.
    words: Callable[[Any], str] = str
    short_words: Callable[[Any], str] = str
    #: Which values are the best: the "least" or the "most".
    best: str = ""
    #: Whose range over seeds stands below the value: "loss" or "score".
    range: str = ""
    #: Written where there is no value.
    missing: str = "–"

    def value(self, result: Summary) -> Any:
        return self.key(result) if callable(self.key) else result[self.key]

    def is_best(self, result: Summary, results: Sequence[Summary]) -> bool:
        """Whether it is the best of its column, alone or with others: not where all are equal, nor if it diverged."""
        finished = [other for other in results if other["loss"] is not None]
        values = [value for other in finished if (value := self.value(other)) is not None]
        if not self.best or result not in finished or len(set(values)) < 2:
            return False
        return bool(self.value(result) == (min if self.best == "least" else max)(values))


def columns_of(course: Summary) -> list[Column]:
    """Those that a course has something for."""
    loss, score, target = course["loss_name"], course["score_name"] or "", course["target"]
    to = "" if target is None else f" to {target:g}"
    share = in_percent(course)
    in_full, short = (percent, "{:.1%}".format) if share else (short_number, "{:.4g}".format)
    all_columns = [
        Column("learning rate", "lr", "lr", short_number, "{:g}".format),
        Column("near the\u00a0best", "", width_of, near_words, best="most"),
        Column(loss, loss, "loss", short_number, "{:.3g}".format, "least", "loss", "diverged"),
        Column(score, score, "score", in_full, short, course["best_score"], "score"),
        Column("steps to\u00a0target", f"steps{to}", "steps_to_target", short_number, "{:,}".format, "least"),
        Column("time to\u00a0target", f"seconds{to}", "seconds_to_target", seconds, human_seconds, "least"),
        Column("", "rates", width_of, short_words=near_words),
        Column("time", "seconds", "seconds", seconds, human_seconds, "least"),
        Column("state / parameter", "", state_of_parameter, lambda b: f"{short_number(b)} B", best="least"),
        Column("", "state", "state_bytes", short_words=human_bytes),
        Column("memory", "memory", "peak_bytes", lambda b: f"{short_number(b / 1e6)} MB", human_bytes, "least"),
        Column("engine", "", "engine"),
    ]
    memory_known = any(result["peak_bytes"] is not None for result in course["results"])
    without = {*(() if to else ("steps to\u00a0target", "time to\u00a0target")), *(() if memory_known else ("memory",))}
    return [column for column in all_columns if (column.title or column.short) and column.title not in without]


def is_known(column: Column, course: Summary) -> bool:
    """Whether a column says something: the loss does, if only that all have diverged."""
    return column.range == "loss" or any(column.value(result) is not None for result in course["results"])


class Width(float):
    """The factor between the rates that lose little; more of them may lie beyond an open one."""

    open: bool = False


def width_of(result: Summary) -> Width | None:
    near = result["near"]
    if near is None:
        return None
    found = Width(near["high"] / near["low"])
    found.open = near["open"]
    return found


def near_words(width: Width) -> str:
    """How far a learning rate may be off, as a factor."""
    return f"{'≥ ' if width.open else ''}{short_number(width, 2)}×"


def seconds(s: float) -> str:
    return f"{short_number(s)} s"


def state_of_parameter(result: Summary) -> float:
    return float(result["state_bytes"] / result["parameters"])
