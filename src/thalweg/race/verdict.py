"""Who won a course, by how much, and how surely: in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Results = Sequence[Mapping[str, Any]]


def verdict(course: Mapping[str, Any]) -> str:
    """The first sentence says who won; others tell of the target, of time and of who diverged."""
    results: Results = course["results"]
    finished = [result for result in results if result["loss"] is not None]
    if not results:
        return "No run of this course is recorded yet."
    if not finished:
        return "Every run of this course diverged."
    failed = [result["contestant"] for result in results if result["loss"] is None]
    sentences = [describe_winner(finished, course["loss_name"]), *describe_way(finished, course)]
    sentences += [f"{join_names(failed)} diverged."] if failed else []
    return " ".join(sentences)


def describe_winner(finished: Results, loss_name: str) -> str:
    best = min(finished, key=lambda result: result["loss"])
    # what differs in digits that are not shown is level: two makes of one optimizer, say
    level = [result for result in finished if f"{result['loss']:.3g}" == f"{best['loss']:.3g}"]
    others = [result for result in finished if result not in level]
    who = join_names([result["contestant"] for result in level])
    name, unit = split_unit(loss_name)
    ended = f"ended {'level, ' if len(level) > 1 else ''}with a {name} of {describe_loss(best, unit)}"
    if not others:
        return f"{who} {ended}."
    second = min(others, key=lambda result: result["loss"])
    behind = f"{compare_losses(best['loss'], second['loss'])} {second['contestant']} with {describe_loss(second)}"
    alone = best["seeds"] == 1 or second["seeds"] == 1
    clear = not alone and best["loss_high"] < second["loss_low"]
    unclear = "in the one seed that ran" if alone else "but not clearly, for the seeds of both overlap"
    if len(level) > 1:
        return f"{who} {ended}, {behind}{'' if clear else f', {unclear}'}."
    return f"{who} {'won' if clear else f'leads, {unclear}'}: it {ended}, {behind}."


def compare_losses(loss: float, other: float) -> str:
    """
    >>> compare_losses(0.6, 0.8), compare_losses(0.799, 0.8), compare_losses(0.02, 0.8), compare_losses(-0.5, 0.25)
    ('25% below', 'less than 1% below', '40 times less than', '0.75 below')
    """
    if loss <= 0:
        return f"{other - loss:.3g} below"
    if loss < 0.1 * other:
        times = other / loss
        return f"{times:{',.0f' if times < 1e6 else '.2g'}} times less than"
    share = 1 - loss / other
    return f"{share:.0%} below" if share >= 0.01 else "less than 1% below"


def split_unit(loss_name: str) -> tuple[str, str]:
    """What is measured, and in what, where the name says so after a comma.

    >>> split_unit("loss, nats a byte"), split_unit("loss")
    (('loss', ' nats a byte'), ('loss', ''))
    """
    name, _, unit = loss_name.partition(", ")
    return name, f" {unit}" if unit else ""


def describe_loss(result: Mapping[str, Any], unit: str = "") -> str:
    loss = f"{result['loss']:.3g}{unit}"
    if result["seeds"] == 1:
        return f"{loss} (one seed)"
    return f"{loss} ({result['loss_low']:.3g} to {result['loss_high']:.3g} over {result['seeds']} seeds)"


def describe_way(finished: Results, course: Mapping[str, Any]) -> list[str]:
    """Who reached the target first, in steps and by the clock."""
    if course["target"] is None:
        return []
    name, unit = split_unit(course["loss_name"])
    goal = f"a {name} of {course['target']:.3g}{unit}"
    arrived = [result for result in finished if result["steps_to_target"] is not None]
    if not arrived:
        return [f"No contestant reached {goal}."]
    steps = min(result["steps_to_target"] for result in arrived)
    first = [result["contestant"] for result in arrived if result["steps_to_target"] == steps]
    said = [f"{join_names(first)} reached {goal} first, in {steps:,} step{'' if steps == 1 else 's'}."]
    quickest = min(arrived, key=lambda result: result["seconds_to_target"])
    if first != [quickest["contestant"]]:  # fewer steps are not less time
        said.append(f"By the clock {quickest['contestant']} was first, after {quickest['seconds_to_target']:.3g} s.")
    return said


def join_names(names: Sequence[str]) -> str:
    """
    >>> join_names(["A"]), join_names(["A", "B"]), join_names(["A", "B", "C"])
    ('A', 'A and B', 'A, B, and C')
    """
    if len(names) < 3:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"
