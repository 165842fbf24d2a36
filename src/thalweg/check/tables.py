"""Reports as tables: passed of those offered, failures, and how to repeat each; in terminals and Markdown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.check.registry import Check
from thalweg.check.run import Report
from thalweg.check.verdicts import CONSTRUCTION, FAILED, NOT_OFFERED, PASSED, Verdict
from thalweg.show.console import make_table
from thalweg.show.extras import extra

with extra("cli"):
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.text import Text

#: Names of checks in one cell.
MOST = 10


def rows(reports: Sequence[Report]) -> list[list[str]]:
    """Passed of those offered, by group and altogether."""
    groups = list(dict.fromkeys(verdict.group for report in reports for verdict in report.verdicts))
    found = []
    for group in groups:
        found.append([group, *(count_passed([v for v in report.verdicts if v.group == group]) for report in reports)])
    return [*found, ["all", *(count_passed(report.verdicts) for report in reports)]]


def count_passed(verdicts: Sequence[Verdict]) -> str:
    """Passed of those offered, as text."""
    offered = [each.outcome for each in verdicts if each.outcome != NOT_OFFERED]
    return f"{offered.count(PASSED)} of {len(offered)}" if offered else "-"


def repeat_command(report: Report, verdict: Verdict) -> str:
    """Write the command that runs this check alone."""
    options = ", ".join(f"{key}={value!r}" for key, value in report.options.items())
    reference = report.subject.partition("(")[0] + f"({options})" if options else report.subject
    ranks = ["--ranks", str(verdict.ranks)] if verdict.ranks else []
    facts = ["--facts", json.dumps(dict(report.facts))] if report.facts else []
    only = ["--only", verdict.check] if verdict.check != CONSTRUCTION else []
    return shlex.join(["thalweg", "check", reference, *facts, *ranks, *only])


def surroundings(reports: Sequence[Report]) -> str:
    versions = {package: version for report in reports for package, version in report.versions.items()}
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def as_markdown(reports: Sequence[Report]) -> str:
    """One row an optimizer: passed of those offered, in one process and over ranks, and what failed."""
    titles = ["optimizer", "in one process", "over ranks", "failed"]
    lines = [line(titles), line(["---"] * len(titles))]
    for report in reports:
        shares = [
            count_passed([each for each in report.verdicts if (each.ranks > 0) is ranks]) for ranks in (False, True)
        ]
        lines.append(line([f"`{report.subject}`", *shares, shorten_list(each.check for each in report.failed)]))
    for report in reports:
        if report.failed:
            lines += ["", f"`{report.subject}`:", ""]
            lines += [f"- **{each.check}**: {each.holds} Seen: {each.seen}" for each in report.failed]
    return "\n".join([*lines, "", surroundings(reports), ""])


def shorten_list(names: Iterable[str]) -> str:
    """All names, or the first ones and how many others there are.

    >>> shorten_list(["zero-grad", "odd"])
    'zero-grad, odd'
    """
    every = list(names)
    if len(every) > MOST:
        every = [*every[: MOST - 1], f"and {len(every) - MOST + 1} others"]
    return ", ".join(every) or "none"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# ---- the terminal


@contextmanager
def progress(console: Console, subject: str) -> Iterator[Callable[[Verdict], None]]:
    """One moving line, if the output is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(subject)
        yield lambda verdict: bars.update(task, description=f"{subject}: {verdict.group}, {verdict.check}")


def show(console: Console, reports: Sequence[Report]) -> None:
    """Print counts by group, then each failure with the command that repeats it."""
    table = make_table()
    table.add_column("group")
    for report in reports:
        table.add_column(Text(report.subject), justify="right")
    for title, *cells in rows(reports):
        table.add_row(title, *cells)
    console.print(table)
    for report in reports:
        for verdict in report.verdicts:
            if verdict.outcome == FAILED:
                console.print()
                console.print(Text(f"failed: {report.subject}, {verdict.check}", "bold red"))
                console.print(Text(f"  must hold: {verdict.holds}"))
                console.print(Text(f"  seen: {verdict.seen}"))
                console.print(Text(f"  again: {repeat_command(report, verdict)}", "dim"), soft_wrap=True)
    for report in reports:
        missing = [f"{each.check} ({each.seen})" for each in report.verdicts if each.outcome == NOT_OFFERED]
        if missing:
            console.print()
            console.print(Text(f"{report.subject}, not offered: {', '.join(missing)}", "dim"))
    console.print()
    console.print(Text(surroundings(reports), "dim"))


def show_list(console: Console, checks: Sequence[Check]) -> None:
    table = make_table()
    for title in ("group", "check", "what must hold"):
        table.add_column(title)
    for each in checks:
        table.add_row(each.group, each.name, each.holds)
    console.print(table)
