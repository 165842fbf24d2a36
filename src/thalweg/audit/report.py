"""What an audit says: a line for each tensor, then faults and remarks in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from thalweg.audit.causes import AS_PAGE, Groups, find_verdict
from thalweg.audit.page import Comparison, Step
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError

HEAD = ("name", "shape", "page", "lr", "decay", "state", "off", "allowed", "verdict")


class AuditError(OptimError):
    """A step that was not the step of its page, or an audit that could not see one; the message says how."""


class Line(NamedTuple):
    """One tensor, or several that are alike: off and allowed are parts of the page's move."""

    names: tuple[str, ...]
    shape: str
    page: str
    lr: str
    decay: str
    #: Bytes for an element, and dtypes.
    state: str
    verdict: str
    off: float
    allowed: float

    @property
    def is_page(self) -> bool:
        return self.verdict.startswith(AS_PAGE)

    def cells(self) -> tuple[str, ...]:
        return told(self.names, 1), *self[1:6], f"{self.off:.1e}", f"{self.allowed:.1e}", self.verdict


@dataclass(frozen=True)
class Report:
    """What an audit tells when printed; :meth:`check` raises it."""

    title: str
    lines: Sequence[Line]
    #: Faults beside the verdicts of lines: of the model, of state, of replicas.
    faults: Sequence[str] = ()
    #: What a reader should know and may be meant.
    remarks: Sequence[str] = ()

    @property
    def findings(self) -> list[str]:
        """All that is not as the page, in words."""
        of_lines = [f"{line.names[0]} ({line.page}): {line.verdict}" for line in self.lines if not line.is_page]
        return [*of_lines, *self.faults]

    def check(self) -> None:
        """Raise an AuditError if anything is not as the page."""
        if self.findings:
            raise AuditError("\n".join([self.title, *self.findings]))

    def __str__(self) -> str:
        alike: dict[tuple[str, ...], Line] = {}
        for line in self.lines:  # of those that are alike the one that is furthest off
            names = alike[line[1:7]].names if line[1:7] in alike else ()
            furthest = max(alike.get(line[1:7], line), line, key=lambda one: one.off)
            alike[line[1:7]] = furthest._replace(names=names + line.names)
        cells = [HEAD, *(line.cells() for line in alike.values())] if self.lines else []
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        beside = [f"fault: {fault}" for fault in self.faults] + [f"remark: {remark}" for remark in self.remarks]
        return "\n".join([self.title, *rows, *beside])


def report_on(
    title: str, steps: Sequence[Step], groups: Groups = (), faults: Iterable[str] = (), remarks: Iterable[str] = ()
) -> Report:
    """A report on steps. groups: of parameters, with their options and lr."""
    lines = [line_of(step, step.compare(), steps, groups) for step in steps]
    of_state = [f"{step.name}: {fault}" for step in steps for fault in step.faults_of_state()]
    return Report(title, lines, [*of_state, *faults], [*dict.fromkeys(remarks)])


def line_of(step: Step, compared: Comparison, steps: Sequence[Step], groups: Groups) -> Line:
    """The line of a tensor."""
    shape, dtypes = step.before.shape, step.state_dtypes
    treatment, page = step.rule.treatment(shape), type(step.rule).__name__
    sizes = {key: DTYPES[dtypes[key]].bytes if dtypes[key] in DTYPES else 1 for key in step.state_after}
    state = sum(entry.size * sizes[key] for key, entry in step.state_after.items()) / step.before.size
    return Line(
        (step.name,),
        f"{'x'.join(map(str, shape)) or '()'} {step.dtype}",
        page if treatment == "elementwise" else f"{page}: {treatment}",
        "by the page" if step.lr is None else f"{step.rate:.4g}",
        f"{step.decay:g}",
        f"{state:.3g} B {', '.join(sorted(set(dtypes.values())))}",
        find_verdict(step, compared, steps, groups),
        compared.off,
        compared.allowed,
    )


def told(names: Sequence[str], most: int = 4) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
