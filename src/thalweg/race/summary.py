"""What came of a race, as plain data: the table, the charts, the report and ``--json`` all show this."""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thalweg.race.run import Record, Result, or_infinite
from thalweg.show.units import count_words

if TYPE_CHECKING:
    from thalweg.race.contest import Race

Summary = dict[str, Any]
Losses = Sequence[float | None]


def summarize(race: Race) -> Summary:
    """The race with everyone at the best of their learning rates, the best of them first."""
    task = race.task
    records = [race.records[run] for run in race.plan()[0] if run in race.records]
    results = list_results(records, task.target)
    summary = {
        "title": task.title or task.name,
        "about": task.about,
        "command": race.command,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # as the last record has it
        "machine": records[-1].where.get("machine", {}) if records else {},
        "versions": records[-1].where.get("versions", {}) if records else {},
        "batch_size": task.batch_size,
        "steps": task.steps,
        "seeds": task.seeds,
        "target": task.target,
        "loss_name": task.loss_name,
        "score_name": (task.score_name or "score") if any(result["curve"]["score"] for result in results) else None,
        "best_score": task.best_score,
        "contestants": [{"name": name, "options": str(contestant)} for name, contestant in race.contestants.items()],
        "search": describe_search(records, results, {name: sweep.grid for name, sweep in race.sweeps.items()}),
        "results": results,
    }
    return {**summary, "verdict": verdict(summary)}


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
    curve = average(results)
    goal = -math.inf if target is None else target
    reached = next((i for i, loss in enumerate(curve["loss"]) if loss is not None and loss <= goal), None)
    scores = [result.score[-1] for result in results if result.score is not None]
    return {
        "contestant": name,
        "lr": best,
        "seeds": len(results),
        "loss": curve["loss"][-1],
        "loss_low": curve["low"][-1],
        "loss_high": curve["high"][-1],
        "score": curve["score"] and curve["score"][-1],
        "score_low": least(scores),
        "score_high": largest(scores),
        "steps_to_target": None if reached is None else curve["step"][reached],
        "seconds_to_target": None if reached is None else curve["seconds"][reached],
        "seconds": curve["seconds"][-1],
        "state_bytes": results[0].state_bytes,
        "parameters": results[0].parameters,
        "curve": curve,
        "sweep": {
            "lr": list(finals),
            "loss": list(finals.values()),
            "stopped": [None if ends[lr] else rates[lr][0].result.step[-1] for lr in finals],
        },
    }


def average(results: Sequence[Result]) -> Summary:
    """The mean over seeds with its least and largest, measure by measure."""
    losses = list(zip(*(result.loss for result in results), strict=True))
    scores = [result.score for result in results if result.score is not None]
    return {
        "step": list(results[0].step),
        "seconds": [mean(moment) for moment in zip(*(result.seconds for result in results), strict=True)],
        "loss": [mean(moment) for moment in losses],
        "low": [least(moment) for moment in losses],
        "high": [largest(moment) for moment in losses],
        "score": [mean(moment) for moment in zip(*scores, strict=True)] if scores else None,
    }


def mean(values: Iterable[float | None]) -> float | None:
    """None if any of them is: a run that diverged spoils the mean, and must."""
    known = list(values)
    return None if None in known else math.fsum(known) / len(known)  # type: ignore[arg-type]


def least(values: Losses) -> float | None:
    return min((value for value in values if value is not None), default=None)


def largest(values: Losses) -> float | None:
    return max((value for value in values if value is not None), default=None)


def in_percent(summary: Summary) -> bool:
    """Whether the scores are shares: all that are known lie between 0 and 1."""
    scores = [score for result in summary["results"] for score in result["curve"]["score"] or ()]
    return all(0 <= score <= 1 for score in scores if score is not None)


def below_zero(summary: Summary) -> bool:
    """Whether a loss is not positive, which no logarithmic axis can show."""
    losses = [loss for r in summary["results"] for loss in (*r["curve"]["low"], *r["sweep"]["loss"])]
    return any(loss <= 0 for loss in losses if loss is not None)


# ---- in words


def describe_search(records: Sequence[Record], results: Sequence[Summary], grids: Mapping[str, Sequence[float]]) -> str:
    """How many rates everyone tried, what came of the search, and who might do better beyond the rates tried."""
    trials = {(record.run.contestant, record.run.lr) for record in records}
    counts = sorted(set(Counter(name for name, _ in trials).values()))
    added = Counter(name for name, lr in trials if lr not in grids[name])
    stopped = sum(record.stopped for record in records)
    words = f"Learning rates tried by everyone: {' to '.join(map(str, counts[:1] + counts[1:][-1:])) or 0}."
    if added:
        words += f" {max(added.values())} of them beside the grid, because a best rate was at its edge."
    if stopped:
        words += f" Hopeless and stopped early: {stopped} of {len(records)} runs (--full finishes all)."
    edges = [
        result["contestant"]
        for result in results
        if result["loss"] is not None and len(result["sweep"]["lr"]) > 1
        if result["lr"] in (result["sweep"]["lr"][0], result["sweep"]["lr"][-1])
    ]
    return words + (f" At the edge of its rates: {', '.join(edges)}." if edges else "")


def verdict(summary: Summary) -> str:
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
