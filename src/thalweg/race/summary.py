"""What came of a race, as plain data: the table, the pictures, the page and ``--json`` all show this."""

from __future__ import annotations

import datetime
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from thalweg.race.programme import Course, Programme
from thalweg.race.run import Record, Result, or_infinite
from thalweg.race.sweep import plan
from thalweg.race.task import Run
from thalweg.race.verdict import verdict
from thalweg.show.palette import BASELINES, colour_of

Summary = dict[str, Any]
#: A rate is near the best if it loses no more than this share of what the best one has won.
NEAR = 0.02
#: What a summary says of a course as it was planned.
COURSE = ("name", "task", "title", "about", "batch_size", "steps", "loss_name", "best_score", "target", "contours")


def summarize(programme: Programme, records: Mapping[Run, Record]) -> Summary:
    """Every course with everyone at the best of their learning rates, the best of them first."""
    plans = [plan(course, records) for course in programme.courses]
    there = [records[run] for each in plans for run in each.runs if run in records]
    return {
        "version": 2,
        "title": programme.title,
        "command": programme.command,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        # as the records have it, which may be another machine than the one that draws
        "machine": there[-1].where["machine"] if there else {},
        "versions": there[-1].where["versions"] if there else {},
        "contestants": [
            {
                "name": name,
                "colour": colour_of(name, programme.rivals),
                "baseline": name in BASELINES,
                "rival": name in programme.rivals,
                "options": options,
                "given": programme.given.get(name, ""),
            }
            for name, options in programme.contestants.items()
        ],
        "near": NEAR,
        "missing": sum(len(each.waiting) + each.later for each in plans),
        "courses": [
            course_summary(course, [records[run] for run in each.runs if run in records])
            for course, each in zip(programme.courses, plans, strict=True)
        ],
    }


def course_summary(course: Course, records: Sequence[Record]) -> Summary:
    by_rate: dict[str, dict[float, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        by_rate[record.run.contestant][record.run.lr].append(record)
    results = [
        result_summary(name, rates, course)
        for name, rates in by_rate.items()
        if not all(record.stopped for tried in rates.values() for record in tried)
    ]
    scored = any(result["curve"]["score"] is not None for result in results)
    found = {
        **{name: getattr(course, name) for name in COURSE},
        "seeds": sorted({run.seed for run in course.runs}),
        "score_name": (course.score_name or "score") if scored else None,
        "results": sorted(results, key=lambda result: or_infinite(result["loss"])),
        "search": search_words(course, records),
    }
    return {**found, "verdict": verdict(found)}


def search_words(course: Course, records: Sequence[Record]) -> str:
    """How many rates everyone tried, and what came of a search that was not just a grid."""
    trials = {(record.run.contestant, record.run.lr) for record in records}
    each = Counter(name for name, _ in trials)
    added = Counter(name for name, _ in trials - {(run.contestant, run.lr) for run in course.runs})
    stopped = sum(record.stopped for record in records)
    counts = " to ".join(str(count) for count in sorted({min(each.values()), max(each.values())})) if each else "0"
    said = f"Everyone tried {counts} learning rate{'' if counts == '1' else 's'}."
    if added:
        said += f" {max(added.values())} of them beside the grid, because a best rate was at its edge."
    if stopped:
        were, them = ("was", "it") if stopped == 1 else ("were", "them")
        said += f" {stopped} of {len(records)} runs {were} hopeless and stopped early: --full finishes {them}."
    return said


def result_summary(name: str, rates: Mapping[float, Sequence[Record]], course: Course) -> Summary:
    """One contestant on one course. The best rate has the least final loss, averaged over seeds: no score has a say."""
    ends = {lr: [record.result for record in records if not record.stopped] for lr, records in rates.items()}
    seeds = max(map(len, ends.values()))
    finals = {lr: mean(result.loss[-1] for result in ends[lr] or [rates[lr][0].result]) for lr in sorted(rates)}
    # a rate that was stopped, or that fewer seeds have tried, is not compared with those that all have
    eligible = [lr for lr, results in ends.items() if len(results) == seeds]
    best = min(eligible, key=lambda lr: or_infinite(finals[lr]))
    results = ends[best]
    curve = average(results)
    goal = -math.inf if course.target is None else course.target
    reached = [i for i, loss in enumerate(curve["loss"]) if loss is not None and loss <= goal]
    finally_scored = [result.score[-1] for result in results if result.score is not None]
    sweep = {
        "lr": list(finals),
        "loss": list(finals.values()),
        "stopped": [None if ends[lr] else rates[lr][0].result.step[-1] for lr in finals],
    }
    return {
        "contestant": name,
        "lr": best,
        "seeds": len(results),
        "loss": curve["loss"][-1],
        "loss_low": curve["low"][-1],
        "loss_high": curve["high"][-1],
        "score": mean(finally_scored) if finally_scored else None,
        "score_low": least(finally_scored),
        "score_high": largest(finally_scored),
        "steps_to_target": curve["step"][reached[0]] if reached else None,
        "seconds_to_target": curve["seconds"][reached[0]] if reached else None,
        "seconds": curve["seconds"][-1],
        "state_bytes": results[0].state_bytes,
        "peak_bytes": largest(result.peak_bytes for result in results),
        "parameters": results[0].parameters,
        "engine": results[0].engine,
        "curve": curve,
        "sweep": sweep,
        "near": near(sweep, best, curve["loss"]),
        "layers": results[0].layers and asdict(results[0].layers),
        "path": results[0].path,
    }


def near(sweep: Summary, best: float, losses: Sequence[float | None]) -> Summary | None:
    """The rates around the best that lose little: at most ``NEAR`` of the way from the first loss to the best one.

    open: at an end of them stands no rate that was finished and did worse, so that they may reach further.
    """
    if losses[0] is None or losses[-1] is None or len(sweep["lr"]) == 1:
        return None
    bound = losses[-1] + NEAR * abs(losses[0] - losses[-1])
    rates, place = sweep["lr"], sweep["lr"].index(best)
    fine = [
        loss is not None and loss <= bound and stopped is None
        for loss, stopped in zip(sweep["loss"], sweep["stopped"], strict=True)
    ]
    low = high = place
    while low > 0 and fine[low - 1]:
        low -= 1
    while high < len(rates) - 1 and fine[high + 1]:
        high += 1
    unknown = [not 0 <= i < len(rates) or sweep["stopped"][i] is not None for i in (low - 1, high + 1)]
    return {"low": rates[low], "high": rates[high], "open": any(unknown)}


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


def in_percent(course: Summary) -> bool:
    """Whether the scores of a course are shares: all that are known lie between 0 and 1."""
    scores = [score for result in course["results"] for score in result["curve"]["score"] or ()]
    return all(0 <= score <= 1 for score in scores if score is not None)


def below_zero(course: Summary) -> bool:
    """Whether a loss is negative, which no logarithmic axis can show."""
    losses = [loss for r in course["results"] for loss in (*r["curve"]["low"], *r["sweep"]["loss"])]
    return any(loss < 0 for loss in losses if loss is not None)


def mean(values: Any) -> float | None:
    """None if any of them is: a run that diverged spoils the mean, and must."""
    found = list(values)
    return None if any(value is None for value in found) else math.fsum(found) / len(found)


def least(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def largest(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)
