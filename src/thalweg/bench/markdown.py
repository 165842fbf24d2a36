"""The record for people: tables in Markdown."""

from __future__ import annotations

from thalweg.bench import words
from thalweg.bench.record import Bench, Comparison


def page(found: Bench) -> str:
    """Everything that a reader needs to judge the figures, and the figures."""
    return "\n\n".join([heading(found), *(table(comparison) for comparison in found.comparisons)]) + "\n"


def heading(found: Bench) -> str:
    """Where, when and with what."""
    device = {"cpu": "the CPU", "cuda": "the GPU"}[found.device]
    parts = [f"# One optimizer step on {device}", words.surroundings(found)]
    if found.command:
        parts.append(f"    {found.command}")
    if found.stopped:
        parts.append("Stopped before all was measured.")
    return "\n\n".join(parts)


def table(found: Comparison) -> str:
    """One comparison, with what stands above and below it."""
    lines = [f"## {words.title(found)}", "", words.work(found)]
    if found.entrants:
        memory = words.has_memory(found)
        titles = words.columns(memory)
        warning = f" **{words.NOT_TO_BE_QUOTED}**" if found.disturbed else ""
        lines += [
            f"{words.bandwidth(found)} {words.disturbance(found)}{warning} Ratios are to {found.reference}.",
            "",
            line(titles),
            "|---|---|" + "---:|" * (len(titles) - 2),
            *(line(words.cells(row, found.itemsize, memory)) for row in found.rows),
        ]
    else:
        lines.append("Nobody could run.")
    for remark in words.remarks(found):
        lines += ["", remark]
    return "\n".join(lines)


def line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
