"""``thalweg check``: does an optimizer keep what users rely on?"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from thalweg.errors import CommandError
from thalweg.show.extras import extra

with extra("cli"):
    import click

#: The exit code where a check failed.
SOME_FAILED = 1


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
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all verdicts to this file."
)
@click.option(
    "--markdown",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a table to this file, one row per optimizer.",
)
def command(
    optimizer: str,
    options: str | None,
    facts: str | None,
    only: str | None,
    against: str | None,
    ranks: int | None,
    listing: bool,
    json_file: Path | None,
    markdown: Path | None,
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

    The exit code is 1 if a check failed, or if one of --against cannot be constructed.
    """
    from thalweg.check.references import ConstructionError, split_references, subject_of
    from thalweg.check.registry import choose_checks
    from thalweg.check.run import check, report_unconstructed
    from thalweg.check.tables import as_markdown, progress, show, show_list
    from thalweg.show.console import aside, console

    given = {"options": parse_json(options, "--options"), "facts": parse_json(facts, "--facts")}
    if listing:
        subject = subject_of(optimizer, given["options"], given["facts"])
        show_list(console(), choose_checks(subject.kind, only, ranks=bool(ranks)))
        return 0
    others = split_references(against or "")
    for reference in others:  # report mistakes before anything is checked
        with suppress(ConstructionError):
            subject_of(reference)
    reports = []
    for place, reference in enumerate([optimizer, *others]):
        own: dict[str, Any] = given if place == 0 else {"options": {}, "facts": {}}
        try:
            with progress(aside(), reference) as on_verdict:
                found = check(
                    reference, only=only, ranks=ranks or 0, facts=own["facts"], on_verdict=on_verdict, **own["options"]
                )
        except ConstructionError as error:
            if place == 0:
                raise
            found = report_unconstructed(reference, error)
        reports.append(found)
    show(console(), reports)
    if json_file is not None:
        json_file.write_text(json.dumps([each.plain() for each in reports], indent=1, default=str) + "\n", "utf-8")
    if markdown is not None:
        markdown.write_text(as_markdown(reports), "utf-8")
    return SOME_FAILED if any(each.failed for each in reports) else 0


def parse_json(text: str | None, option: str) -> dict[str, Any]:
    """Read a JSON object, such as the value of --options."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{option} {text!r:.200} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f'{option} must be a JSON object such as {{"lr": 0.1}}, got {text!r}')
    return found
