"""Reports as seen in a terminal and in Markdown: what failed first, and optimizers side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.check.registry import Check
from thalweg.check.run import FAILED, NOT_OFFERED, PASSED, Report, Verdict
from thalweg.show.extras import extra

with extra("cli"):
    from rich import box
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text

STYLES = {PASSED: "green", FAILED: "bold red", NOT_OFFERED: "dim"}


@contextmanager
def progress(console: Console, subject: str) -> Iterator[Callable[[Verdict], None]]:
    """One moving line, if the output is a terminal."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(subject)
        yield lambda verdict: bars.update(task, description=f"{subject}: {verdict.group}, {verdict.check}")


def show(console: Console, reports: Sequence[Report]) -> None:
    """Counts by group for each, then what failed, with how to see it again."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
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
                console.print(Text(f"failed: {report.subject}, {verdict.check}", STYLES[FAILED]))
                console.print(Text(f"  must hold: {verdict.holds}"))
                console.print(Text(f"  seen: {verdict.seen}"))
                console.print(Text(f"  again: {again(report, verdict)}", "dim"), soft_wrap=True)
    for report in reports:
        missing = [f"{each.check} ({each.seen})" for each in report.verdicts if each.outcome == NOT_OFFERED]
        if missing:
            console.print()
            console.print(Text(f"{report.subject}, not offered: {', '.join(missing)}", "dim"))
    console.print()
    console.print(Text(surroundings(reports), "dim"))


def show_list(console: Console, checks: Sequence[Check]) -> None:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("group", "check", "what must hold"):
        table.add_column(title)
    for each in checks:
        table.add_row(each.group, each.name, each.holds)
    console.print(table)


def rows(reports: Sequence[Report]) -> list[list[str]]:
    """Passed of those offered, by group and altogether."""
    groups = list(dict.fromkeys(verdict.group for report in reports for verdict in report.verdicts))
    found = []
    for group in groups:
        own = [[v for v in report.verdicts if v.group == group and v.outcome != NOT_OFFERED] for report in reports]
        found.append([group, *(share(each) for each in own)])
    found.append(["all", *(share([v for v in report.verdicts if v.outcome != NOT_OFFERED]) for report in reports)])
    return found


def share(verdicts: Sequence[Verdict]) -> str:
    passed = sum(each.outcome == PASSED for each in verdicts)
    return f"{passed} of {len(verdicts)}" if verdicts else "-"


def again(report: Report, verdict: Verdict) -> str:
    """The command that runs this check alone."""
    options = ", ".join(f"{key}={value!r}" for key, value in report.options.items())
    reference = report.subject.partition("(")[0] + (f"({options})" if options else "")
    ranks = ["--ranks", str(verdict.ranks)] if verdict.ranks else []
    return shlex.join(["thalweg", "check", reference, *ranks, "--only", verdict.check])


def surroundings(reports: Sequence[Report]) -> str:
    versions = {package: version for report in reports for package, version in report.versions.items()}
    return ", ".join(f"{package} {version}" for package, version in versions.items())


def as_markdown(reports: Sequence[Report]) -> str:
    """The counts, and what failed, for a page."""
    titles = ["", *(f"`{report.subject}`" for report in reports)]
    lines = [line(titles), line(["---"] * len(titles)), *(line(row) for row in rows(reports)), ""]
    for report in reports:
        if report.failed:
            lines += [f"`{report.subject}`:", ""]
            lines += [f"- **{each.check}**: {each.holds} Seen: {each.seen}" for each in report.failed]
            lines += [""]
    return "\n".join([*lines, surroundings(reports), ""])


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
