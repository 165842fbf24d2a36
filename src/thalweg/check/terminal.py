"""Print reports: optimizers side by side, then what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from thalweg.check.registry import Check
from thalweg.check.run import Report
from thalweg.check.tables import repeat_command, rows, surroundings
from thalweg.check.verdicts import FAILED, NOT_OFFERED, PASSED, Verdict
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
    """Print counts by group, then each failure with the command that repeats it."""
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
                console.print(Text(f"  again: {repeat_command(report, verdict)}", "dim"), soft_wrap=True)
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
