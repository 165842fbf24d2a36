"""What an audit has found: a line for tensors that are alike, then faults and remarks in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from thalweg.audit.page import Comparison, Step
from thalweg.dtypes import DTYPES
from thalweg.errors import OptimError

BYTES = {name: dtype.bytes for name, dtype in DTYPES.items()}

#: The verdict on a step that is the page's.
AS_PAGE = "as the page"


class AuditError(OptimError):
    """A step that was not the step of its page, or an audit that could not see one; the message says how."""


@dataclass(frozen=True)
class Line:
    """One tensor, or several that are alike."""

    names: tuple[str, ...]
    page: str
    shape: str
    lr: str
    decay: str
    #: Bytes of state for an element, and the dtypes of state.
    state: str
    #: How far the move is from the page's, and how far its dtypes allow, both relative to the page's move.
    off: float
    allowed: float
    verdict: str

    @property
    def is_page(self) -> bool:
        return self.verdict.startswith(AS_PAGE)

    def cells(self) -> tuple[str, ...]:
        name, *more = self.names
        told = f"{name} and {len(more)} more" if more else name
        numbers = f"{self.off:.1e}", f"{self.allowed:.1e}"
        return told, self.shape, self.page, self.lr, self.decay, self.state, *numbers, self.verdict


@dataclass(frozen=True)
class Report:
    """What an audit tells when printed; :meth:`check` raises it."""

    title: str
    lines: Sequence[Line]
    #: Faults beside the verdicts of lines: of the model, of state, of replicas.
    faults: Sequence[str] = ()
    #: What a reader should know and is no fault.
    remarks: Sequence[str] = field(default_factory=list)

    @property
    def findings(self) -> list[str]:
        """All that is not as the page, in words."""
        wrong = (f"{line.cells()[0]} ({line.page}): {line.verdict}" for line in self.lines if not line.is_page)
        return [*wrong, *self.faults]

    def check(self) -> None:
        """Raise an AuditError if anything is not as the page."""
        if self.findings:
            raise AuditError(f"{self.title}\n" + "\n".join(self.findings))

    def __str__(self) -> str:
        head = ("name", "shape", "page", "lr", "decay", "state", "off", "allowed", "verdict")
        cells = [head, *(line.cells() for line in merged(self.lines))]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        rows = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        told = [f"fault: {fault}" for fault in self.faults] + [f"remark: {remark}" for remark in self.remarks]
        return "\n".join([self.title, *(rows if self.lines else []), *told])


def merged(lines: Sequence[Line]) -> list[Line]:
    """Lines that differ in names and in how far they are off alone, as one: the one that is furthest off."""
    found: dict[tuple[str, ...], Line] = {}
    for line in lines:
        key = (*line.cells()[1:6], line.verdict)
        first = found.setdefault(key, line)
        if first is not line:
            worst = max(first, line, key=lambda one: one.off)
            found[key] = Line(first.names + line.names, *list(vars(worst).values())[1:])
    return list(found.values())


def line_of(step: Step, verdict: str, found: Comparison) -> Line:
    """The line of a tensor."""
    shape, rule = tuple(step.before.shape), step.rule
    treatment, dtypes = rule.treatment(shape), sorted(set(step.state_dtypes.values()))
    kept = sum(entry.size * BYTES.get(step.state_dtypes[key], 1) for key, entry in step.state_after.items())
    return Line(
        (step.name,),
        type(rule).__name__ + ("" if treatment == "elementwise" else f": {treatment}"),
        f"{'x'.join(map(str, shape)) or '()'} {step.dtype}",
        "by the page" if step.lr is None else f"{step.rate:.4g}",
        f"{getattr(rule, 'weight_decay', 0.0):g}",
        f"{kept / step.before.size:.3g} B {', '.join(dtypes)}",
        found.off,
        found.allowed,
        verdict,
    )
