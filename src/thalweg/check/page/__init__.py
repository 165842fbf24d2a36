"""The report of a check: one HTML file that opens anywhere, without a network. Every text in it is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from thalweg.check.run import Report
from thalweg.check.tables import repeat_command, rows, surroundings
from thalweg.check.verdicts import FAILED, NOT_OFFERED, PASSED, Verdict
from thalweg.show.page import frame_page, read_part

MARKS = {PASSED: "✓", FAILED: "✗", NOT_OFFERED: "–"}


def document(reports: Sequence[Report]) -> str:
    """The whole file, for one optimizer or several side by side."""
    failed = [each for report in reports for each in report.failed]
    total = sum(len(report.verdicts) for report in reports)
    body = Template(read_part("page.html", __name__)).substitute(
        results=results(reports),
        nothing_failed="" if failed else "hidden",
        failures="\n".join(failure(name, reports) for name in dict.fromkeys(each.check for each in failed)),
        groups="\n".join(group(name, reports) for name in names_of(reports, "group")),
        surroundings=escape(surroundings(reports)),
    )
    return frame_page(
        verb="check",
        title=reports[0].subject if len(reports) == 1 else f"{len(reports)} optimizers",
        verdict=f"{len(failed)} of {total} verdicts are failures." if failed else "Nothing failed.",
        style=read_part("page.css", __name__),
        body=body,
        scripts='<script>watchTheme(document.getElementById("dark"), () => {});</script>',
    )


def names_of(reports: Sequence[Report], field: str) -> list[str]:
    """Groups or checks of all reports, in their order."""
    return list(dict.fromkeys(getattr(verdict, field) for report in reports for verdict in report.verdicts))


def head(reports: Sequence[Report], title: str) -> str:
    cells = "".join(f'<th scope="col">{escape(report.subject)}</th>' for report in reports)
    return f'<thead><tr><th scope="col">{title}</th>{cells}</tr></thead>'


def results(reports: Sequence[Report]) -> str:
    """Counts by group, and altogether."""
    lines = []
    for title, *shares in rows(reports):
        cells = "".join(f'<td class="share">{escape(share)}</td>' for share in shares)
        lines.append(f'<tr><th scope="row">{escape(title)}</th>{cells}</tr>')
    return f"{head(reports, 'group')}<tbody>{''.join(lines)}</tbody>"


def verdicts_on(name: str, reports: Sequence[Report]) -> list[Verdict | None]:
    """What a check said of each optimizer; None where it was not run."""
    return [next((each for each in report.verdicts if each.check == name), None) for report in reports]


def failure(name: str, reports: Sequence[Report]) -> str:
    """What must hold, and of each that failed what was seen and how to see it again."""
    parts, must = [], ""
    for report, verdict in zip(reports, verdicts_on(name, reports), strict=True):
        if verdict is not None and verdict.outcome == FAILED:
            must = verdict.holds
            parts.append(
                f'<dd class="who">{escape(report.subject)}</dd><dt>seen</dt><dd>{escape(verdict.seen)}</dd>'
                f"<dt>again</dt><dd><code>{escape(repeat_command(report, verdict))}</code></dd>"
            )
    return f'<article><h3 class="failed">{escape(name)}</h3><p>{escape(must)}</p><dl>{"".join(parts)}</dl></article>'


def group(name: str, reports: Sequence[Report]) -> str:
    """A table of the checks of a group, folded until it is wanted."""
    own = [verdict for report in reports for verdict in report.verdicts if verdict.group == name]
    lines = "".join(line(check, reports) for check in dict.fromkeys(each.check for each in own))
    return (
        f'<details><summary>{escape(name)}</summary><div class="sideways" tabindex="0">'
        f'<table class="all">{head(reports, "check")}<tbody>{lines}</tbody></table></div></details>'
    )


def line(name: str, reports: Sequence[Report]) -> str:
    found = verdicts_on(name, reports)
    holds = next(each.holds for each in found if each is not None)
    cells = "".join(cell(each) for each in found)
    return f'<tr><th scope="row">{escape(name)}<small>{escape(holds)}</small></th>{cells}</tr>'


def cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "<td></td>"
    kind = verdict.outcome.replace(" ", "-")
    return (
        f'<td class="{kind}"><span aria-label="{verdict.outcome}">{MARKS[verdict.outcome]}</span>'
        f"<small>{escape(verdict.seen)}</small></td>"
    )
