"""What came of a race, as plain data and in words: the terminal, the report and ``--json`` all show this."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from thalweg.race.run import Record, Result, or_infinite
from thalweg.show.units import count_words, human_bytes, human_seconds, percent, short_number

if TYPE_CHECKING:
    from thalweg.race.contest import Race

Summary = dict[str, Any]


def summarize(race: Race) -> Summary:
    """The race with everyone at the best of their learning rates, the best of them first."""
    task = race.task
    records = [race.records[run] for run in race.plan() if run in race.records]
    results = list_results(records, task.target)
    where = records[-1].where if records else {}
    return {
        "title": task.title or task.name,
        "about": task.about,
        "command": race.command,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # as the last record has it
        "machine": where.get("machine", {}),
        "versions": where.get("versions", {}),
        "batch_size": task.batch_size,
        "steps": task.steps,
        "seeds": task.seeds,
        "target": task.target,
        "loss_name": task.loss_name,
        "score_name": (task.score_name or "score") if any(result["curve"]["score"] for result in results) else None,
        "best_score": task.best_score,
        "contestants": [
            {"name": name, "options": str(sweep.contestant), "grid": list(sweep.contestant.rates)}
            for name, sweep in race.sweeps.items()
        ],
        "runs": len(records),
        "results": results,
    }


def list_results(records: Sequence[Record], target: float | None) -> list[Summary]:
    """What came of each contestant that has finished a run, the least loss first."""
    by_rate: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_rate[record.run.contestant][record.run.lr].append(record)
    results = [
        summarize_contestant(name, rates, target)
        for name, rates in by_rate.items()
        if not all(record.stopped for tried in rates.values() for record in tried)
    ]
    return sorted(results, key=lambda result: or_infinite(result["loss"]))


def summarize_contestant(name: str, rates: Mapping[float, Sequence[Record]], target: float | None) -> Summary:
    """One contestant. The best rate has the least final loss, averaged over seeds: no score has a say."""
    ends = {lr: [record.result for record in records if not record.stopped] for lr, records in rates.items()}
    seeds = max(map(len, ends.values()))
    finals = {lr: mean(result.loss[-1] for result in ends[lr] or [rates[lr][0].result]) for lr in sorted(rates)}
    # a rate that was stopped, or that fewer seeds have tried, is not compared with those that all have
    eligible = [lr for lr, results in ends.items() if len(results) == seeds]
    best = min(eligible, key=lambda lr: or_infinite(finals[lr]))
    results = ends[best]
    curve = average_curves(results)
    goal = -math.inf if target is None else target
    reached = next((i for i, loss in enumerate(curve["loss"]) if loss is not None and loss <= goal), None)
    scores = [result.score[-1] for result in results if result.score is not None]
    score_low, score_high = range_of(scores)
    until = len(curve["loss"]) - curve["loss"].count(None)
    return {
        "contestant": name,
        "lr": best,
        "seeds": len(results),
        "loss": finals[best],
        "loss_low": curve["low"][-1],
        "loss_high": curve["high"][-1],
        "score": mean(scores) if scores else None,
        "score_low": score_low,
        "score_high": score_high,
        "steps_to_target": None if reached is None else curve["step"][reached],
        "seconds_to_target": None if reached is None else curve["seconds"][reached],
        "seconds": curve["seconds"][-1],
        "state_bytes": results[0].state_bytes,
        "parameters": results[0].parameters,
        # until it diverged in any seed
        "curve": {key: values and values[:until] for key, values in curve.items()},
        "sweep": {
            "lr": list(finals),
            "loss": list(finals.values()),
            "stopped": [None if ends[lr] else rates[lr][0].result.step[-1] for lr in finals],
        },
    }


def average_curves(results: Sequence[Result]) -> Summary:
    """The mean over seeds with its least and largest, measure by measure."""
    losses = list(zip(*(result.loss for result in results), strict=True))
    low, high = zip(*map(range_of, losses), strict=True)
    scores = [result.score for result in results if result.score is not None]
    return {
        "step": list(results[0].step),
        "seconds": [mean(moment) for moment in zip(*(result.seconds for result in results), strict=True)],
        "loss": [mean(moment) for moment in losses],
        "low": list(low),
        "high": list(high),
        "score": [mean(moment) for moment in zip(*scores, strict=True)] if scores else None,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """The mean; None if any value is: a run that diverged spoils it, and must."""
    listed = list(values)
    return None if None in listed else math.fsum(listed) / len(listed)  # type: ignore[arg-type]


def range_of(values: Iterable[float | None]) -> tuple[float, float] | tuple[None, None]:
    """The least and the largest of those that are known."""
    present = [value for value in values if value is not None]
    return (min(present), max(present)) if present else (None, None)


def in_percent(summary: Summary) -> bool:
    """Whether the scores are shares: all that are known lie between 0 and 1."""
    scores = [score for result in summary["results"] for score in result["curve"]["score"] or ()]
    return all(0 <= score <= 1 for score in scores if score is not None)


def below_zero(summary: Summary) -> bool:
    """Whether a loss is not positive, which no logarithmic axis can show."""
    losses = [loss for r in summary["results"] for loss in (*r["curve"]["low"], *r["sweep"]["loss"])]
    return any(loss <= 0 for loss in losses if loss is not None)


# ---- in words


class Column(NamedTuple):
    title: str
    #: The key of a result that stands there, and how its value is written.
    key: str
    write: Callable[[Any], str]
    #: Which values are the best: the "least" or the "most"; "": none is.
    best: str = "least"


def describe(summary: Summary) -> Summary:
    """A summary with the texts of its report: conditions, size, rows, verdict."""
    columns = list_columns(summary)
    return {
        **summary,
        "verdict": give_verdict(summary),
        "size": describe_size(summary),
        "conditions": describe_conditions(summary),
        "columns": ["optimizer", *(column.title for column in columns)],
        "rows": [describe_result(result, columns, summary["results"]) for result in summary["results"]],
    }


def list_columns(summary: Summary) -> list[Column]:
    """The columns for which a race has figures."""
    target, goal = summary["target"], "" if summary["target"] is None else f" to {summary['target']:g}"
    score = percent if in_percent(summary) else short_number
    columns = [Column("lr", "lr", short_number, ""), Column(summary["loss_name"], "loss", short_number)]
    if summary["score_name"]:
        columns.append(Column(summary["score_name"], "score", score, summary["best_score"]))
    if target is not None:
        columns.append(Column(f"steps{goal}", "steps_to_target", short_number))
        columns.append(Column(f"seconds{goal}", "seconds_to_target", human_seconds))
    return [*columns, Column("seconds", "seconds", human_seconds), Column("state", "state_bytes", human_bytes)]


def describe_result(result: Summary, columns: Sequence[Column], results: Sequence[Summary]) -> Summary:
    """A row of the table: who it is, and of each column the text, the range over seeds and whether it is the best."""
    cells = []
    for column in columns:
        value, low, high = (result.get(f"{column.key}{end}") for end in ("", "_low", "_high"))
        text, seeds = "diverged" if column.key == "loss" else "–", ""
        if value is not None:
            text = column.write(value)
        if value is None and low is not None:
            seeds = "in some seeds"
        elif low != high:
            seeds = f"{column.write(low)} to {column.write(high)}"
        # alone or with others: not where all are equal, nor if it diverged
        values = {other[column.key] for other in results if other["loss"] is not None} - {None}
        is_best = column.best and result["loss"] is not None and len(values) > 1
        best = (min if column.best == "least" else max)(values, default=None)
        cells.append({"text": text, "seeds": seeds, "is_best": bool(is_best and value == best)})
    return {"contestant": result["contestant"], "cells": cells}


def describe_size(summary: Summary) -> str:
    """How much everyone trains."""
    batches = "" if summary["batch_size"] is None else f" with batches of {summary['batch_size']:,}"
    parameters = f", {count_words(summary['results'][0]['parameters'], 'parameter')}" if summary["results"] else ""
    return f"{count_words(summary['steps'], 'step')}{batches}{parameters}; {count_words(summary['seeds'], 'seed')}"


def describe_conditions(summary: Summary) -> str:
    """What is the same for everyone, how the search went, and who might do better beyond the rates tried."""
    sweeps = {result["contestant"]: result["sweep"] for result in summary["results"]}
    counts = sorted({len(sweep["lr"]) for sweep in sweeps.values()})
    grids = {who["name"]: who["grid"] for who in summary["contestants"]}
    added = max((len(set(sweep["lr"]) - set(grids[name])) for name, sweep in sweeps.items()), default=0)
    stopped = sum(step is not None for sweep in sweeps.values() for step in sweep["stopped"])
    words = "Each at its best learning rate, by final loss. "
    words += f"Learning rates tried by everyone: {' to '.join(map(str, counts[:1] + counts[1:][-1:])) or 0}."
    if added:
        words += f" {added} of them beside the grid, because a best rate was at its edge."
    if stopped:
        words += f" Hopeless and stopped early: {stopped} of {summary['runs']} runs (--full finishes all)."
    at_edge = [result["contestant"] for result in summary["results"] if is_at_edge(result)]
    if at_edge:
        words += f" At the edge of its rates: {', '.join(at_edge)}."
    return (
        f"{words} Weights do not decay and momentum is 0.9 where a default is 0, unless an option says otherwise. "
        "Seconds: training alone, one run at a time."
    )


def is_at_edge(result: Summary) -> bool:
    """Whether a contestant's best rate is the least or the largest of several that were tried."""
    rates = result["sweep"]["lr"]
    return result["loss"] is not None and len(rates) > 1 and result["lr"] in (rates[0], rates[-1])


def give_verdict(summary: Summary) -> str:
    """One sentence: who won, by how much, and how surely."""
    finished = [result for result in summary["results"] if result["loss"] is not None]
    if not finished:
        return "Every run diverged." if summary["results"] else "No run is recorded yet."
    best, *others = finished
    name, _, unit = summary["loss_name"].partition(", ")
    ended = f"it ended with a {name} of {describe_loss(best)}{f' {unit}' if unit else ''}"
    if not others:
        return f"{best['contestant']} ran alone: {ended}."
    second = others[0]
    behind = f"{second['contestant']} with {describe_loss(second)}"
    if best["seeds"] == 1 or second["seeds"] == 1:
        return f"{best['contestant']} leads, in the one seed that ran: {ended}, {behind}."
    if best["loss_high"] < second["loss_low"]:
        return f"{best['contestant']} won: {ended}, {behind}."
    return f"{best['contestant']} leads, but not clearly, for the seeds of both overlap: {ended}, {behind}."


def describe_loss(result: Summary) -> str:
    if result["seeds"] == 1:
        return f"{result['loss']:.3g}"
    seeds = count_words(result["seeds"], "seed")
    return f"{result['loss']:.3g} ({result['loss_low']:.3g} to {result['loss_high']:.3g} over {seeds})"
