"""``thalweg check``: does an optimizer keep what users rely on?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing

from thalweg.check.plugin import NOT_OFFERED, PASSED, Report, Verdict, choose_checks, make_world, names_of, run_checks
from thalweg.check.subject import parse_json, subject_of
from thalweg.show.console import aside, console, make_table
from thalweg.show.extras import extra

with extra("cli"):
    import click
    from rich.text import Text


@click.command("check")
@click.argument("optimizer")
@click.option("--options", metavar="JSON", help="Options of OPTIMIZER, such as '{\"lr\": 0.1}'.")
@click.option("--facts", metavar="JSON", help="What its author declares, such as '{\"couples_parameters\": true}'.")
@click.option("--only", metavar="LIST", help="Checks or groups, separated by commas, such as state,zero-grad.")
@click.option("--against", metavar="LIST", help="Other optimizers to compare with, such as 'torch.optim.SGD(lr=0.1)'.")
@click.option(
    "--ranks",
    type=click.IntRange(2, 8),
    is_flag=False,
    flag_value=4,
    help="Also check replicas, shards and their checkpoints, with this many processes (4 if no number is given).",
)
@click.option("--list", "listing", is_flag=True, help="List the checks for this optimizer and run none.")
def command(
    optimizer: str,
    options: str | None,
    facts: str | None,
    only: str | None,
    against: str | None,
    ranks: int | None,
    listing: bool,
) -> int:
    """Does an optimizer, yours or another library's, keep what users rely on? More than a hundred small checks.

    OPTIMIZER is a class for torch, a function that makes a gradient transformation for optax, or a rule.

    \b
    thalweg check torch.optim.AdamW
    thalweg check mypackage:MyOptimizer --options '{"lr": 0.1}'
    thalweg check 'optax:adamw(learning_rate=1e-3)'             options as in a call
    thalweg check thalweg.torch.LAMB --only state,layouts       some groups
    thalweg check mypackage:MyOptimizer --only lr-zero          one check again
    thalweg check torch.optim.AdamW --against thalweg.torch.AdamW,thalweg.torch.LAMB
    thalweg check mypackage:MyOptimizer --ranks                 replicas and shards too, with four processes

    The exit code is 1 if a check failed.
    """
    # at commas outside of brackets
    others = [reference.strip() for reference in re.split(r",(?![^(]*\))", against or "") if reference.strip()]
    subjects = [subject_of(optimizer, parse_json(options, "--options"), parse_json(facts, "--facts"))]
    subjects += map(subject_of, others)
    chosen = [choose_checks(subject.kind, only, ranks or 0) for subject in subjects]
    if listing:
        for check in chosen[0]:
            name, group = names_of(check)
            console().print(Text(f"{group}, {name}: {check.__doc__}"), soft_wrap=True)
        return 0
    names = ", ".join(subject.name for subject in subjects)
    with closing(make_world(ranks or 0)) as world, aside().status(Text(names)):
        reports = [run_checks(*pair, world) for pair in zip(subjects, chosen, strict=True)]
    show(reports)
    return 1 if any(report.failed for report in reports) else 0


def show(reports: Sequence[Report]) -> None:
    """Print how many passed of those offered, by group; then what failed, and what is not offered."""
    out, table = console(), make_table()
    table.add_column("group")
    for report in reports:
        table.add_column(Text(report.subject), justify="right")
    for group in dict.fromkeys(verdict.group for report in reports for verdict in report.verdicts):
        table.add_row(group, *(count_passed([v for v in report.verdicts if v.group == group]) for report in reports))
    table.add_row("all", *(count_passed(report.verdicts) for report in reports))
    out.print(table)
    for report in reports:
        for verdict in report.failed:
            out.print()
            out.print(Text(f"failed: {report.subject}, {verdict.check}", "bold red"))
            out.print(Text(f"  must hold: {verdict.holds}"))
            out.print(Text(f"  seen: {verdict.seen}"))
    for report in reports:
        missing = [f"{v.check} ({v.seen})" for v in report.verdicts if v.outcome == NOT_OFFERED]
        if missing:
            out.print()
            out.print(Text(f"{report.subject}, not offered: {', '.join(missing)}", "dim"))


def count_passed(verdicts: Sequence[Verdict]) -> str:
    """Passed of those offered, as text."""
    offered = [verdict.outcome for verdict in verdicts if verdict.outcome != NOT_OFFERED]
    return f"{offered.count(PASSED)} of {len(offered)}" if offered else "-"
