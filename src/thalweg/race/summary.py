"""What came of a race, as plain data: the table, the pictures, the page and ``--json`` all show this."""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from thalweg.race.programme import Course, Programme
from thalweg.race.run import Record, Result, Run
from thalweg.show.palette import BASELINES, colour_of

Summary = dict[str, Any]


def summarized(programme: Programme, records: Mapping[Run, Record]) -> Summary:
    """Every course with everyone at the best of their learning rates, the best of them first."""
    wanted = [run for course in programme.courses for run in course.runs]
    there = [records[run] for run in wanted if run in records]
    return {
        "version": 1,
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
        "missing": len(wanted) - len(there),
        "courses": [course_summary(course, records) for course in programme.courses],
    }


def course_summary(course: Course, records: Mapping[Run, Record]) -> Summary:
    by_rate: dict[str, dict[float, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for run in course.runs:
        if run in records:
            by_rate[run.contestant][run.lr].append(records[run].result)
    results = [result_summary(name, rates, course) for name, rates in by_rate.items()]
    scored = any(result["curve"]["score"] is not None for result in results)
    return {
        "name": course.name,
        "task": course.task,
        "title": course.title,
        "about": course.about,
        "batch_size": course.batch_size,
        "steps": course.steps,
        "seeds": sorted({run.seed for run in course.runs}),
        "loss_name": course.loss_name,
        "score_name": (course.score_name or "score") if scored else None,
        "target": course.target,
        "results": sorted(results, key=lambda result: unless_none(result["loss"])),
        "contours": course.contours,
    }


def result_summary(name: str, rates: Mapping[float, Sequence[Result]], course: Course) -> Summary:
    """One contestant on one course. The best rate has the least final loss, averaged over seeds: no score has a say."""
    seeds = max(map(len, rates.values()))
    finals = {lr: mean(result.loss[-1] for result in results) for lr, results in rates.items()}
    # where a race was stopped, a rate that not all seeds have tried yet is not compared with those they have
    eligible = [lr for lr, results in rates.items() if len(results) == seeds]
    best = min(eligible, key=lambda lr: unless_none(finals[lr]))
    results = rates[best]
    curve = averaged(results)
    reached = [i for i, loss in enumerate(curve["loss"]) if loss is not None and within(loss, course.target)]
    finally_scored = [result.score[-1] for result in results if result.score is not None]
    return {
        "contestant": name,
        "lr": best,
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
        "parameters": results[0].parameters,
        "engine": results[0].engine,
        "curve": curve,
        "sweep": {"lr": sorted(rates), "loss": [finals[lr] for lr in sorted(rates)]},
        "layers": layers_summary(results[0]),
        "path": None if results[0].path is None else [list(point) for point in results[0].path],
    }


def averaged(results: Sequence[Result]) -> Summary:
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


def layers_summary(result: Result) -> Summary | None:
    layers = result.layers
    if layers is None:
        return None
    return {
        "names": list(layers.names),
        "step": list(layers.step),
        "update": [list(row) for row in layers.update],
        "trust": None if layers.trust is None else [list(row) for row in layers.trust],
    }


def in_percent(course: Summary) -> bool:
    """Whether the scores of a course are shares: all that are known lie between 0 and 1."""
    scores = [score for result in course["results"] for score in result["curve"]["score"] or ()]
    return all(0 <= score <= 1 for score in scores if score is not None)


def below_zero(course: Summary) -> bool:
    """Whether a loss is negative, which no logarithmic axis can show."""
    losses = [loss for r in course["results"] for loss in (*r["curve"]["low"], *r["sweep"]["loss"])]
    return any(loss < 0 for loss in losses if loss is not None)


def within(loss: float, target: float | None) -> bool:
    return target is not None and loss <= target


def mean(values: Any) -> float | None:
    """None if any of them is: a run that diverged spoils the mean, and must."""
    found = list(values)
    return None if any(value is None for value in found) else math.fsum(found) / len(found)


def unless_none(loss: float | None) -> float:
    """What diverged comes last."""
    return math.inf if loss is None else loss


def least(values: Any) -> float | None:
    return min((value for value in values if value is not None), default=None)


def largest(values: Any) -> float | None:
    return max((value for value in values if value is not None), default=None)
