"""What an audit says: what became of each tensor in a step, in words, and what is to be told beside that."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from thalweg.audit.explanations import AS_PAGE, Groups, judge
from thalweg.audit.page import Step
from thalweg.dtypes import DTYPES, NARROW
from thalweg.errors import OptimError
from thalweg.rules.entries import Factor


class AuditError(OptimError):
    """A step that was not the step of its page, or an audit that could not see one; the message says how."""


class Line(NamedTuple):
    """What is told of one tensor."""

    name: str
    shape: str
    page: str
    lr: str
    decay: str
    #: Bytes for an element, and dtypes.
    state: str
    #: How far the move is off the page's, and how far dtypes allow, as parts of it.
    off: str
    allowed: str
    verdict: str


@dataclass
class Report:
    """What an audit tells when printed; :meth:`check` raises it."""

    title: str
    lines: Sequence[Line] = ()
    #: Faults beside the verdicts of lines: of state, of the model, of replicas.
    faults: Sequence[str] = ()
    #: What a reader should know and may be meant.
    remarks: Sequence[str] = ()

    @property
    def findings(self) -> list[str]:
        """All that is not as the page, in words."""
        others = [line for line in self.lines if not line.verdict.startswith(AS_PAGE)]
        return [*(f"{line.name} ({line.page}): {line.verdict}" for line in others), *self.faults]

    def check(self) -> None:
        """Raise an AuditError if anything is not as the page."""
        if self.findings:
            raise AuditError("\n".join([self.title, *self.findings]))

    def __str__(self) -> str:
        kinds: dict[Any, list[Line]] = defaultdict(list)
        for line in self.lines:
            kinds[line[1:6], line.verdict].append(line)
        rows = [Line._fields] if kinds else []
        for alike in kinds.values():  # of those that are alike the one that is furthest off
            name = name_some([line.name for line in alike], 1)
            rows.append(max(alike, key=lambda line: float(line.off))._replace(name=name))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        beside = [f"fault: {fault}" for fault in self.faults] + [f"remark: {remark}" for remark in self.remarks]
        return "\n".join([self.title, *table, *beside])

    def tell(self, steps: Sequence[Step], groups: Groups, beside: Mapping[str, Sequence[str]]) -> Self:
        """Fill it. groups: options of all, with "lr". beside: faults in words, each with the names of what has them."""
        self.lines = [line_of(step, *judge(step, steps, groups)) for step in steps]
        of_state = defaultdict[str, list[str]](list)
        for step in steps:
            verdicts = {key: judge(step, key=key)[0] for key in list_comparable(step)}
            for key in [key for key, verdict in verdicts.items() if not verdict.startswith(AS_PAGE)]:
                of_state[f"its state {key!r} {verdicts[key]}"].append(step.name)
        self.faults = [*list_words(of_state), *list_words(beside)]
        self.remarks = [*list_words(remark(steps))]
        return self


def line_of(step: Step, verdict: str, off: float, allowed: float) -> Line:
    shape = step.gradient.shape
    treatment, page = step.rule.treatment(shape), type(step.rule).__name__
    sizes = {key: DTYPES[dtype].bytes if dtype in DTYPES else 1 for key, dtype in step.dtypes.items() if key}
    size = sum(step.after[key].size * sizes[key] for key in sizes if key in step.after) / max(1, step.gradient.size)
    return Line(
        step.name,
        f"{'x'.join(map(str, shape)) or '()'} {step.dtypes['']}",
        page if treatment == "elementwise" else f"{page}: {treatment}",
        "by the page" if step.lr is None else f"{step.rate:.4g}",
        f"{step.decay:g}",
        f"{size:.3g} B {', '.join(sorted({step.dtypes[key] for key in sizes}))}",
        f"{off:.1e}",
        f"{allowed:.1e}",
        verdict,
    )


def list_comparable(step: Step) -> list[str]:
    """The entries of state of which the page tells what they are: not codes, nor factors, of which many are as good."""
    entries = step.rule.entries(step.gradient.shape)
    keys = [key for key, entry in entries.items() if step.dtypes.get(key) in DTYPES and not isinstance(entry, Factor)]
    return [key for key in keys if np.isfinite(step.page[key]).all()]


def remark(steps: Iterable[Step]) -> Mapping[str, list[str]]:
    """What may be meant, and a reader should know: in words, each with the names of what it is about."""
    remarks: dict[str, list[str]] = defaultdict(list)
    ways: dict[Any, dict[str, str]] = defaultdict(dict)
    for step in steps:
        dtype, stored = step.dtypes[""], {key: dtype for key, dtype in step.dtypes.items() if key}
        empty = sorted(key for key in step.before.keys() & stored.keys() if not step.before[key].any())
        if empty and step.t > 1 and step.gradient.any() and step.gradient.size > 1:
            remarks[f"before step {step.t} its state {', '.join(empty)} is all zero"].append(step.name)
        narrow = [key for key in stored if stored[key] in NARROW and stored[key] != dtype]
        if narrow and step.precision.dtype in NARROW:
            remarks[f"its state {', '.join(narrow)} is in 16 bits, and it is in {dtype}"].append(step.name)
        bits, dtypes = re.search(r"(\d+) ?_?bit", step.kind), ", ".join(sorted({*stored.values()}))
        if bits and stored and "int" not in dtypes and bits[1] not in dtypes:
            remarks[f"{step.kind} has {bits[1]} bits in its name, and keeps its state in {dtypes}"].append(step.name)
        if step.gradient.ndim > 1:
            ways[step.gradient.shape][f"{type(step.rule).__name__}, lr {step.rate:g}, decay {step.decay:g}"] = step.name
    for names in ways.values():
        if len(names) > 1:
            remarks[f"of one shape, and stepped by {'; by '.join(names)}"] += names.values()
    return remarks


def list_words(sentences: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Sentences of names, and of words about them."""
    return (f"{name_some(names, 4)}: {words}" for words, names in sentences.items() if names)


def name_some(names: Sequence[str], most: int) -> str:
    """Some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
